// A kernel that is right with FAULT 0 and wrong in one way with each other number: what the emulation must catch.
//
// values [64] -> copied [64]: copied[0] = values[0], copied[n] = values[n - 1]. sums [2]: of each SIMD-group's values.
// 64 threads together, one item. The numbers are explained where the harness expects the reports.
uint own = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;
bool last = own == 63u;

float value = values[FAULT == 1 && last ? own + 1u : own];
if (FAULT == 2) {
  float few[4] = {value, value, value, value};
  value = few[own];
}
if (FAULT == 3) {
  value = float(1u << own);
}
if (FAULT == 4) {
  value = float(uint(-1.0f - value));
}
if (FAULT == 5) {
  THREADGROUP_ARRAY(float, large, 8193);
  large[own] = value;
}

THREADGROUP_ARRAY(float, shared, 64);
if (!(FAULT == 6 && own == 20u)) {
  shared[FAULT == 7 && last ? own + 1u : own] = value;
}
if (FAULT == 8 && own >= 40u) {
  return;
}
if (FAULT == 9 && own >= 32u) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
} else if (FAULT == 10) {
  threadgroup_barrier(mem_flags::mem_device);
} else if (FAULT != 11) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
float before = shared[own == 0u ? 0u : own - 1u];
if (FAULT == 12 && last) {
  shared[61] = 0.0f;
}

float sum = 0.0f;
if (!(FAULT == 13 && lane >= 16u)) {
  sum = simd_sum(value);
}
if (FAULT == 14) {
  sum = simd_shuffle_xor(sum, ushort(32));
}
if (lane == 0u) {
  sums[simdgroup_index_in_threadgroup] = sum;
}
if (!(FAULT == 15 && own == 7u)) {
  copied[FAULT == 16 && last ? 0u : own] = before;
}
if (FAULT == 17 && last) {
  copied[64] = before;
}
