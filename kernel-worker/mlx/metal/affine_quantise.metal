// values [rows, columns] -> packed [rows, words], scales [rows, groups], minimums [rows, groups].
// sizes: columns, words, groups. One SIMD-group per group of GROUP columns: items [groups, rows].
//
//   minimum = smallest value, rounded to f16
//   scale   = (largest - minimum) / most, rounded to f16      most = 2^BITS - 1
//   code    = (value - minimum) / scale, halves to even, in 0 to most
//
// Codes are chosen against the rounded scale and minimum, which is what reading multiplies with. GROUP is a multiple
// of 32, so a group is whole words. The last group of a row may have fewer columns. A group with a value that is no
// finite number gets NaN as scale and minimum: it comes back as NaN instead of as something plausible.
constexpr uint WORDS = uint(GROUP * BITS / 32);
constexpr float MOST = float((1 << BITS) - 1);
uint lane = thread_index_in_simdgroup;
uint group = threadgroup_position_in_grid.x;
uint row = threadgroup_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
uint first = group * uint(GROUP);
uint count = min(uint(GROUP), columns - first);

float smallest = INFINITY;
float largest = -INFINITY;
float poison = 0.0f;
for (uint index = lane; index < count; index += 32u) {
  float value = float(values[row * columns + first + index]);
  smallest = fmin(smallest, value);
  largest = fmax(largest, value);
  poison += value * 0.0f;
}
smallest = simd_min(smallest);
largest = simd_max(largest);
poison = simd_sum(poison);
half stored_minimum = half(smallest + poison);
float minimum = float(stored_minimum);
// Rounding may put the minimum of equal values above them.
half stored_scale = half(fmax(largest - minimum, 0.0f) / MOST + poison);
float scale = float(stored_scale);

THREADGROUP_ARRAY(uint, codes, GROUP);
for (uint index = lane; index < count; index += 32u) {
  float value = float(values[row * columns + first + index]);
  float steps = scale > 0.0f ? rint((value - minimum) / scale) : 0.0f;
  codes[index] = uint(fmin(fmax(steps, 0.0f), MOST));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint word = lane; word < WORDS && group * WORDS + word < words; word += 32u) {
  packed[row * words + group * WORDS + word] = packed_word<BITS>(codes, 0u, count, word);
}
if (lane == 0u) {
  scales[row * sizes[2] + group] = stored_scale;
  minimums[row * sizes[2] + group] = stored_minimum;
}
