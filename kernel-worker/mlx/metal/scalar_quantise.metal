// values [rows, columns] -> packed [rows, words] of signed codes, scales [rows, groups].
// sizes: columns, words, groups. One SIMD-group per group of GROUP columns: items [groups, rows].
//
//   scale = largest magnitude / most, rounded to f16      most = 2^(BITS-1) - 1
//   code  = value / scale, halves to even, in -most to most, as BITS bits of two's complement
//
// GROUP is a multiple of 32, so a group is whole words. The last group of a row may have fewer columns. A group
// with a value that is no finite number gets NaN as its scale: it comes back as NaN instead of as something plausible.
constexpr uint WORDS = uint(GROUP * BITS / 32);
constexpr float MOST = float((1 << (BITS - 1)) - 1);
uint lane = thread_index_in_simdgroup;
uint group = threadgroup_position_in_grid.x;
uint row = threadgroup_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
uint first = group * uint(GROUP);
uint count = min(uint(GROUP), columns - first);

float largest = 0.0f;
float poison = 0.0f;
for (uint index = lane; index < count; index += 32u) {
  float value = float(values[row * columns + first + index]);
  largest = fmax(largest, fabs(value));
  poison += value * 0.0f;
}
largest = simd_max(largest);
poison = simd_sum(poison);
half stored = half(largest / MOST + poison);
float scale = float(stored);

THREADGROUP_ARRAY(uint, codes, GROUP);
for (uint index = lane; index < count; index += 32u) {
  float value = float(values[row * columns + first + index]);
  float steps = scale > 0.0f ? rint(value / scale) : 0.0f;
  codes[index] = uint(int(fmin(fmax(steps, -MOST), MOST)));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint word = lane; word < WORDS && group * WORDS + word < words; word += 32u) {
  packed[row * words + group * WORDS + word] = packed_word<BITS>(codes, 0u, count, word);
}
if (lane == 0u) {
  scales[row * sizes[2] + group] = stored;
}
