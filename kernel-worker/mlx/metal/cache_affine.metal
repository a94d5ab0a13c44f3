// keys, values [kv_heads, capacity, WORDS] of packed codes; their scales and minimums [kv_heads, capacity, GROUPS].
// A row is what affine_quantise makes of K columns, and read as affine_dequantise reads it.
constexpr uint WORDS = uint((K * BITS + 31) / 32);
constexpr uint GROUPS = uint((K + GROUP - 1) / GROUP);
#define DECODED(codes, scales, minimums, row, element) \
  (float(packed_code<BITS>(codes, (row) * WORDS, element)) * float(scales[(row) * GROUPS + (element) / uint(GROUP)]) + \
   float(minimums[(row) * GROUPS + (element) / uint(GROUP)]))
#define KEY(row, element) DECODED(keys, key_scales, key_minimums, row, element)
#define VALUE(row, element) DECODED(values, value_scales, value_minimums, row, element)
