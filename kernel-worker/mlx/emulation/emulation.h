// Emulates the part of Metal that the kernels use, so that their text can be compiled as C++20 and run without a Mac.
//
// It is an emulation for tests, and never a backend.
//
// It shows that a kernel's text is C++ that means what the oracle says, for the sizes that were tried. It stops a kernel
// that leaves a buffer or array, reads threadgroup memory that nobody wrote, lacks a barrier between two threads' accesses,
// diverges around a barrier or SIMD-group operation, takes more threadgroup memory or threads than there are, or writes
// an element of an output from two threads or not at all.
//
// It does not show that Metal's own compiler accepts the text (C++20 that Metal lacks would pass), that address spaces
// fit, what the GPU's registers allow, how fast a kernel is, or how the GPU rounds and orders sums where Metal leaves
// that open. Threads take turns, so a race in device memory shows only as two writers of an output.
//
// * fault.h: how a mistake is reported.       * numbers.h: scalar and vector types.
// * threads.h: threads as fibers.             * memory.h: checked buffers and threadgroup arrays.
// * functions.h: Metal's functions.           * this file: a process that runs one dispatch.
//
// The program that includes this is generated: a function per kernel in the form that MLX would generate, and a table
// of variants. The process reads one dispatch from stdin and writes the outputs to stdout, all numbers little-endian:
//
//   in:  variant u32, grid 3 u32, threadgroup 3 u32, inputs u32, {bytes u64, data} each, outputs u32, {bytes u64} each
//   out: the outputs' data, one after the other
#pragma once

#include <unistd.h>

#include "functions.h"

namespace emulation {

// Where a thread is, under the names of Metal's attributes.
struct Thread {
  uint3 thread_position_in_grid;
  uint3 threadgroup_position_in_grid;
  uint3 thread_position_in_threadgroup;
  uint thread_index_in_simdgroup;
  uint simdgroup_index_in_threadgroup;
};

inline void read_exactly(void* data, size_t bytes) {
  if (bytes > 0 && std::fread(data, 1, bytes, stdin) != bytes) {
    fault("the dispatch on stdin is cut short");
  }
}

template <class T>
T read_number() {
  T value;
  read_exactly(&value, sizeof value);
  return value;
}

inline uint3 read_extent() {
  uint x = read_number<uint32_t>();
  uint y = read_number<uint32_t>();
  uint z = read_number<uint32_t>();
  return {x, y, z};
}

// One dispatch: its buffers and extents.
class Dispatch {
 public:
  static Dispatch read() {
    Dispatch dispatch;
    dispatch.grid_ = read_extent();
    dispatch.threadgroup_ = read_extent();
    dispatch.inputs_.resize(read_number<uint32_t>());
    for (Buffer& input : dispatch.inputs_) {
      input.bytes = read_number<uint64_t>();
      // Not a byte more than the input has, so that a tool that watches the heap sees the same ends.
      input.data = std::make_unique<char[]>(input.bytes);
      read_exactly(input.data.get(), input.bytes);
    }
    dispatch.outputs_.resize(read_number<uint32_t>());
    for (Buffer& output : dispatch.outputs_) {
      output.bytes = read_number<uint64_t>();
      output.data = std::make_unique<char[]>(output.bytes);
    }
    return dispatch;
  }

  template <class T>
  Input<T> input(size_t position, const char* name) const {
    const Buffer& buffer = inputs_.at(position);
    return {name, reinterpret_cast<const T*>(buffer.data.get()), buffer.bytes / sizeof(T)};
  }

  template <class T>
  Output<T> output(size_t position, const char* name) {
    Buffer& buffer = outputs_.at(position);
    buffer.name = name;
    buffer.writers.assign(buffer.bytes / sizeof(T), NOBODY);
    return {name, reinterpret_cast<T*>(buffer.data.get()), buffer.writers.data(), buffer.writers.size()};
  }

  // Runs `kernel(thread)` for the whole grid. As when Metal is given threads, not threadgroups, the last threadgroup
  // in each direction ends with the grid.
  template <class Kernel>
  void run(Kernel kernel) {
    uint3 at{0, 0, 0};
    for (at.z = 0; at.z * threadgroup_.z < grid_.z; at.z++) {
      for (at.y = 0; at.y * threadgroup_.y < grid_.y; at.y++) {
        for (at.x = 0; at.x * threadgroup_.x < grid_.x; at.x++) {
          run_threadgroup(at, kernel);
        }
      }
    }
    for (const Buffer& output : outputs_) {
      for (size_t index = 0; index < output.writers.size(); index++) {
        if (output.writers[index] == NOBODY) {
          fault("%s[%zu] was never written", output.name, index);
        }
      }
    }
  }

  void write_outputs() const {
    for (const Buffer& output : outputs_) {
      if (output.bytes > 0 && std::fwrite(output.data.get(), 1, output.bytes, stdout) != output.bytes) {
        fault("stdout was closed");
      }
    }
    std::fflush(stdout);
  }

 private:
  struct Buffer {
    const char* name = "";
    uint64_t bytes = 0;
    std::unique_ptr<char[]> data;
    std::vector<uint32_t> writers;
  };

  template <class Kernel>
  void run_threadgroup(uint3 at, const Kernel& kernel) {
    uint3 first{at.x * threadgroup_.x, at.y * threadgroup_.y, at.z * threadgroup_.z};
    uint3 size{std::min(threadgroup_.x, grid_.x - first.x), std::min(threadgroup_.y, grid_.y - first.y),
               std::min(threadgroup_.z, grid_.z - first.z)};
    ThreadgroupMemory::current().start_threadgroup();
    uint32_t count = size.x * size.y * size.z;
    Threads::current().run(count, threads_before_, [&](uint32_t index) {
      uint3 in_group{index % size.x, index / size.x % size.y, index / size.x / size.y};
      kernel(Thread{{first.x + in_group.x, first.y + in_group.y, first.z + in_group.z},
                    at,
                    in_group,
                    index % SIMDGROUP_THREADS,
                    index / SIMDGROUP_THREADS});
    });
    threads_before_ += count;
  }

  uint3 grid_{};
  uint3 threadgroup_{};
  std::vector<Buffer> inputs_;
  std::vector<Buffer> outputs_;
  uint32_t threads_before_ = 0;
};

// Runs the dispatch that stdin holds with a variant of the table.
template <size_t COUNT>
int serve(void (*const (&variants)[COUNT])(Dispatch&)) {
  // Ends a kernel that loops for ever.
  alarm(60);
  uint32_t variant = read_number<uint32_t>();
  if (variant >= COUNT) {
    fault("there is no variant %u", variant);
  }
  Dispatch dispatch = Dispatch::read();
  variants[variant](dispatch);
  dispatch.write_outputs();
  return 0;
}

}  // namespace emulation
