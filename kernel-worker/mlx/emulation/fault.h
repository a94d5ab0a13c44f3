// How the emulation reports what a kernel did wrong: one line on stderr and an exit status of its own.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emulation {

// The harness tells a caught fault from any other end of the process by it.
constexpr int FAULT_STATUS = 3;

// Ends the process. Unwinding through fibers is undefined, so there is no exception.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fault(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("fault: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::fflush(stderr);
  std::_Exit(FAULT_STATUS);
}

}  // namespace emulation
