// Metal's scalar and vector types as far as the kernels use them.
//
// `half` and `bfloat` only store: every conversion from float rounds to nearest, ties to even, and all arithmetic
// happens in float. That is also how the kernels are written.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

using uint = uint32_t;
using ushort = uint16_t;

struct uint3 {
  uint x, y, z;
};

class half {
 public:
  half() = default;
  explicit half(float value) : bits_(rounded(value)) {}

  explicit operator float() const {
    uint32_t sign = uint32_t(bits_ & 0x8000u) << 16;
    uint32_t exponent = (bits_ >> 10) & 31u;
    uint32_t fraction = bits_ & 0x3FFu;
    if (exponent == 31u) {
      return std::bit_cast<float>(sign | 0x7F800000u | fraction << 13);
    }
    if (exponent == 0u) {
      float magnitude = std::ldexp(float(fraction), -24);
      return sign != 0u ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | (exponent + 112u) << 23 | fraction << 13);
  }

 private:
  static uint16_t rounded(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
    float magnitude = std::fabs(value);
    if (std::isnan(value)) {
      return uint16_t(sign | 0x7E00u);
    }
    // 65520 lies half way between the largest half, 65504, and what would be next.
    if (magnitude >= 65520.0f) {
      return uint16_t(sign | 0x7C00u);
    }
    // Below 2^-14 halves are multiples of 2^-24; rint rounds ties to even, and its 1024 is the smallest normal half.
    if (magnitude < 0x1p-14f) {
      return uint16_t(sign | uint16_t(std::rint(magnitude * 0x1p24f)));
    }
    uint32_t rebased = (bits & 0x7FFFFFFFu) - (112u << 23);
    return uint16_t(sign | (rebased + 0xFFFu + (rebased >> 13 & 1u)) >> 13);
  }

  uint16_t bits_;
};

class bfloat {
 public:
  bfloat() = default;
  explicit bfloat(float value) : bits_(rounded(value)) {}

  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits_) << 16); }

 private:
  static uint16_t rounded(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
      return uint16_t(bits >> 16 | 0x40u);
    }
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }

  uint16_t bits_;
};

// The names that MLX gives the types of arrays.
using float16_t = half;
using bfloat16_t = bfloat;
