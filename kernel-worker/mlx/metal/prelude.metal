// Goes in front of every kernel: MLX takes it as the kernel's `header`.
//
// The bodies name inputs and index them; they never spell an address space, because MLX puts an input of fewer than
// eight elements into `constant` and a longer one into `device`. Indices are 32 bits: a buffer has fewer than 2^32
// elements. MLX compiles without fast math, on which the treatment of infinities and NaN relies.

// The emulation brings its own, which watches the array.
#ifndef THREADGROUP_ARRAY
#define THREADGROUP_ARRAY(type, name, length) threadgroup type name[length]
#endif

// Packed codes are a stream of bits, least significant bit first, cut into words: code `c` is bits `c BITS` to
// `(c + 1) BITS - 1`; with 3 bits it may lie in two words.

// Makes word `word` of the stream of `count` codes that start at `codes[first]`; bits beyond the last code are 0.
template <int BITS, typename Codes>
inline uint packed_word(Codes codes, uint first, uint count, uint word) {
  uint start = word * 32u;
  uint value = 0u;
  for (uint index = start / uint(BITS); index < count && index * uint(BITS) < start + 32u; index++) {
    uint at = index * uint(BITS);
    uint code = uint(codes[first + index]) & ((1u << BITS) - 1u);
    value |= at >= start ? code << (at - start) : code >> (start - at);
  }
  return value;
}

// Reads code `index` of the stream that starts at `words[first]`.
template <int BITS, typename Words>
inline uint packed_code(Words words, uint first, uint index) {
  uint at = index * uint(BITS);
  uint word = first + at / 32u;
  uint shift = at % 32u;
  uint code = words[word] >> shift;
  if (shift + uint(BITS) > 32u) {
    code |= words[word + 1u] << (32u - shift);
  }
  return code & ((1u << BITS) - 1u);
}
