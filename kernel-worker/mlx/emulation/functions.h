// Metal's functions as far as the kernels use them, under Metal's names.
//
// The order in which Metal adds up a `simd_sum` is not told; here lanes are added from first to last.
#pragma once

#include <algorithm>
#include <cmath>

#include "memory.h"
#include "numbers.h"

using std::cos;
using std::exp;
using std::fabs;
using std::fmax;
using std::fmin;
using std::max;
using std::min;
using std::rint;
using std::sin;
using std::sqrt;

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline mem_flags operator|(mem_flags left, mem_flags right) { return mem_flags(uint32_t(left) | uint32_t(right)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  bool orders_memory = (uint32_t(flags) & uint32_t(mem_flags::mem_threadgroup)) != 0;
  emulation::Threads::current().wait_at_barrier(orders_memory, line);
}

namespace emulation {

template <class T, class Combine>
T reduce(T value, const char* operation, int line, Combine combine) {
  Threads::Exchange all = Threads::current().exchange(value, operation, line);
  T result = all.of<T>(0);
  for (uint32_t lane = 1; lane < all.count; lane++) {
    result = combine(result, all.of<T>(lane));
  }
  return result;
}

}  // namespace emulation

inline float simd_sum(float value, int line = __builtin_LINE()) {
  return emulation::reduce(value, "simd_sum", line, [](float left, float right) { return left + right; });
}

inline float simd_max(float value, int line = __builtin_LINE()) {
  return emulation::reduce(value, "simd_max", line, [](float left, float right) { return std::fmax(left, right); });
}

inline float simd_min(float value, int line = __builtin_LINE()) {
  return emulation::reduce(value, "simd_min", line, [](float left, float right) { return std::fmin(left, right); });
}

inline float simd_shuffle_xor(float value, ushort mask, int line = __builtin_LINE()) {
  emulation::Threads::Exchange all = emulation::Threads::current().exchange(value, "simd_shuffle_xor", line);
  uint32_t other = all.lane ^ mask;
  if (other >= all.count) {
    emulation::fault("simd_shuffle_xor of lane %u at line %d reads lane %u of %u", all.lane, line, other, all.count);
  }
  return all.of<float>(other);
}
