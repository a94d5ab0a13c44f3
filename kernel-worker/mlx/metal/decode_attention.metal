// Attention of one new token: queries [H, K] -> attended [H, K]; KEY and VALUE read the cache, see cache_*.metal.
// mask [length], true = visible, is read only if MASKED. scale: factor on the scores.
// sizes: length, capacity (positions that a head's cache has room for), query heads per key/value head.
// THREADS threads together per query head: items [H].
//
// SIMD-group s takes positions s, s + SIMDGROUPS, ... and keeps an online softmax: the largest score so far, and sums
// of weights relative to it. Lane l holds elements l, l + 32, ... of query and sums. At the end the SIMD-groups' sums
// are brought to one largest score and added. If no position is visible, or a score is no finite number, the head's
// output is NaN: nothing is made up for it.
constexpr uint SIMDGROUPS = uint(THREADS / 32);
constexpr uint PER_LANE = uint((K + 31) / 32);
uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
uint head = threadgroup_position_in_grid.x;
uint length = sizes[0];
uint first_row = head / sizes[2] * sizes[1];

float query[PER_LANE];
float sums[PER_LANE];
for (uint index = 0u; index < PER_LANE; index++) {
  uint element = lane + 32u * index;
  query[index] = element < uint(K) ? float(queries[head * uint(K) + element]) * scale[0] : 0.0f;
  sums[index] = 0.0f;
}
float largest = -INFINITY;
float total = 0.0f;
for (uint position = simdgroup; position < length; position += SIMDGROUPS) {
  // The same for all lanes, so the SIMD-group stays together.
  if (MASKED && !mask[position]) {
    continue;
  }
  uint row = first_row + position;
  float score = 0.0f;
  for (uint index = 0u; index < PER_LANE; index++) {
    uint element = lane + 32u * index;
    if (element < uint(K)) {
      score += query[index] * KEY(row, element);
    }
  }
  score = simd_sum(score);
  float larger = fmax(largest, score);
  // Equal infinities would give NaN; the final rescaling judges them.
  float kept = largest == larger ? 1.0f : exp(largest - larger);
  float weight = score == larger ? 1.0f : exp(score - larger);
  total = total * kept + weight;
  for (uint index = 0u; index < PER_LANE; index++) {
    uint element = lane + 32u * index;
    if (element < uint(K)) {
      sums[index] = sums[index] * kept + weight * VALUE(row, element);
    }
  }
  largest = larger;
}

THREADGROUP_ARRAY(float, all_largest, SIMDGROUPS);
THREADGROUP_ARRAY(float, all_totals, SIMDGROUPS);
THREADGROUP_ARRAY(float, all_sums, SIMDGROUPS * uint(K));
if (lane == 0u) {
  all_largest[simdgroup] = largest;
  all_totals[simdgroup] = total;
}
for (uint index = 0u; index < PER_LANE; index++) {
  uint element = lane + 32u * index;
  if (element < uint(K)) {
    all_sums[simdgroup * uint(K) + element] = sums[index];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

bool has_part = lane < SIMDGROUPS;
float part_largest = has_part ? all_largest[lane] : -INFINITY;
float overall = simd_max(part_largest);
// -INFINITY - -INFINITY is NaN: a head that saw nothing ends there.
float divisor = simd_sum(has_part ? all_totals[lane] * exp(part_largest - overall) : 0.0f);
for (uint element = thread_position_in_threadgroup.x; element < uint(K); element += uint(THREADS)) {
  float sum = 0.0f;
  for (uint part = 0u; part < SIMDGROUPS; part++) {
    sum += all_sums[part * uint(K) + element] * exp(all_largest[part] - overall);
  }
  attended[head * uint(K) + element] = T(sum / divisor);
}
#undef KEY
#undef VALUE
