// values [rows, D] -> transformed [rows, D]: y[i] = sum over j of (-1)^popcount(i & j) x[j] / sqrt(D).
// D threads together per row: items [rows]. D is a power of two.
//
// Stage `stride` adds and subtracts elements whose indices differ in that bit. Both lie in one SIMD-group while
// stride < 32; from there on they meet in threadgroup memory.
uint element = thread_position_in_threadgroup.x;
uint row = threadgroup_position_in_grid.x;
float value = float(values[row * uint(D) + element]);
for (uint stride = 1u; stride < uint(D) && stride < 32u; stride *= 2u) {
  float other = simd_shuffle_xor(value, ushort(stride));
  value = (element & stride) != 0u ? other - value : value + other;
}
THREADGROUP_ARRAY(float, exchanged, D);
for (uint stride = 32u; stride < uint(D); stride *= 2u) {
  exchanged[element] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float other = exchanged[element ^ stride];
  // Without it a fast thread would overwrite what a slow one has yet to read.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = (element & stride) != 0u ? other - value : value + other;
}
transformed[row * uint(D) + element] = T(value * (1.0f / sqrt(float(D))));
