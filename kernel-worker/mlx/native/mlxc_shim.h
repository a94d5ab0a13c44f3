// Force-included when the unmodified mlx-c sources are compiled.
//
// What they lack on some machines: libstdc++ before 13 has no <format> (mlx-c formats with plain "{}" only), and mlx-c
// declares its half-precision accessors on Arm only, although MLX has the types everywhere.
#pragma once
#if defined(__cplusplus)

#include <version>
#if !defined(__cpp_lib_format)
#include <sstream>
#include <string>
#include <string_view>
namespace std {
template <class... Arguments>
inline string format(string_view pattern, const Arguments&... arguments) {
  ostringstream out;
  size_t at = 0;
  auto text_before_placeholder = [&] {
    size_t placeholder = pattern.find("{}", at);
    size_t end = placeholder == string_view::npos ? pattern.size() : placeholder;
    out << pattern.substr(at, end - at);
    at = placeholder == string_view::npos ? pattern.size() : placeholder + 2;
  };
  ((text_before_placeholder(), out << arguments), ...);
  out << pattern.substr(at);
  return out.str();
}
} // namespace std
#endif

#if !defined(__aarch64__) && __has_include("mlx/types/half_types.h")
#include "mlx/types/half_types.h"
#define HAS_FLOAT16
#define HAS_BFLOAT16
using mlx::core::bfloat16_t;
using mlx::core::float16_t;
#endif

#endif
