// The threads of one threadgroup as fibers of one system thread.
//
// A fiber runs until it waits: at a threadgroup barrier or at an operation of its SIMD-group. A barrier opens when all
// fibers of the threadgroup wait at it, a SIMD-group operation when all of the SIMD-group wait at the same one. If
// nothing can go on, control flow was divergent: some thread ended or waits elsewhere. (Metal defines SIMD-group
// operations for the active threads of a divergent SIMD-group; the emulation demands all, which our kernels keep to.)
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "fault.h"

namespace emulation {

constexpr uint32_t SIMDGROUP_THREADS = 32;
constexpr uint32_t MAXIMUM_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10;

enum class State { Runnable, AtBarrier, AtSimdOperation, Finished };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  // Where it waits: the line of the kernel, and what it calls there.
  int line;
  const char* operation;
  // What it brought to the SIMD-group operation, and what all brought to the last one that opened.
  uint64_t offered;
  uint64_t published;
};

class Threads {
 public:
  static Threads& current() {
    static Threads threads;
    return threads;
  }

  // Runs `body(index)` for every thread of a threadgroup, whose first thread has the given number in the whole grid.
  void run(uint32_t count, uint32_t first_in_grid, const std::function<void(uint32_t)>& body) {
    if (count == 0 || count > MAXIMUM_THREADS) {
      fault("a threadgroup of %u threads; Metal allows 1 to %u", count, MAXIMUM_THREADS);
    }
    body_ = &body;
    count_ = count;
    first_in_grid_ = first_in_grid;
    epoch_ = 1;
    while (fibers_.size() < count) {
      fibers_.push_back(Fiber{});
      fibers_.back().stack.reset(new char[STACK_BYTES]);
    }
    for (uint32_t index = 0; index < count; index++) {
      start(fibers_[index]);
    }
    while (resume_runnable() || open_simdgroups() || open_barrier()) {
    }
    for (uint32_t index = 0; index < count; index++) {
      if (fibers_[index].state != State::Finished) {
        report_divergence(index);
      }
    }
  }

  uint32_t index() const { return running_; }
  uint32_t index_in_grid() const { return first_in_grid_ + running_; }
  // Number of the stretch between barriers that order threadgroup memory.
  uint32_t epoch() const { return epoch_; }

  void wait_at_barrier(bool orders_memory, int line) {
    wait(State::AtBarrier, orders_memory ? "threadgroup_barrier" : "threadgroup_barrier that orders no memory", line);
  }

  struct Exchange {
    const Fiber* first;
    uint32_t count;
    uint32_t lane;

    template <class T>
    T of(uint32_t other) const {
      T value;
      std::memcpy(&value, &first[other].published, sizeof value);
      return value;
    }
  };

  // Waits for the whole SIMD-group and returns what each of its threads brought.
  template <class T>
  Exchange exchange(T value, const char* operation, int line) {
    static_assert(sizeof value <= sizeof(uint64_t));
    std::memcpy(&fibers_[running_].offered, &value, sizeof value);
    wait(State::AtSimdOperation, operation, line);
    uint32_t first = running_ / SIMDGROUP_THREADS * SIMDGROUP_THREADS;
    return {&fibers_[first], simdgroup_count(first), running_ - first};
  }

 private:
  static void enter() {
    Threads& self = current();
    Fiber& own = self.fibers_[self.running_];
    (*self.body_)(self.running_);
    own.state = State::Finished;
    swapcontext(&own.context, &self.scheduler_);
  }

  void start(Fiber& fiber) {
    fiber.state = State::Runnable;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Threads::enter, 0);
  }

  void wait(State state, const char* operation, int line) {
    Fiber& own = fibers_[running_];
    own.state = state;
    own.operation = operation;
    own.line = line;
    swapcontext(&own.context, &scheduler_);
  }

  bool resume_runnable() {
    bool resumed = false;
    for (running_ = 0; running_ < count_; running_++) {
      if (fibers_[running_].state == State::Runnable) {
        swapcontext(&scheduler_, &fibers_[running_].context);
        resumed = true;
      }
    }
    return resumed;
  }

  uint32_t simdgroup_count(uint32_t first) const { return std::min(SIMDGROUP_THREADS, count_ - first); }

  // Whether the fibers wait at the same place in the given state.
  bool wait_together(uint32_t first, uint32_t count, State state) const {
    for (uint32_t index = first; index < first + count; index++) {
      const Fiber& fiber = fibers_[index];
      if (fiber.state != state || fiber.line != fibers_[first].line || fiber.operation != fibers_[first].operation) {
        return false;
      }
    }
    return true;
  }

  bool open_simdgroups() {
    bool opened = false;
    for (uint32_t first = 0; first < count_; first += SIMDGROUP_THREADS) {
      uint32_t count = simdgroup_count(first);
      if (wait_together(first, count, State::AtSimdOperation)) {
        for (uint32_t index = first; index < first + count; index++) {
          // A fast thread offers to the next operation before slow ones have read this one.
          fibers_[index].published = fibers_[index].offered;
          fibers_[index].state = State::Runnable;
        }
        opened = true;
      }
    }
    return opened;
  }

  bool open_barrier() {
    if (!wait_together(0, count_, State::AtBarrier)) {
      return false;
    }
    if (std::strcmp(fibers_[0].operation, "threadgroup_barrier") == 0) {
      epoch_++;
    }
    for (uint32_t index = 0; index < count_; index++) {
      fibers_[index].state = State::Runnable;
    }
    return true;
  }

  [[noreturn]] void report_divergence(uint32_t stuck) const {
    const Fiber& waiting = fibers_[stuck];
    for (uint32_t index = 0; index < count_; index++) {
      const Fiber& other = fibers_[index];
      if (other.state == State::Finished) {
        fault("divergent flow: thread %u waits at line %d (%s), thread %u has finished", stuck, waiting.line,
              waiting.operation, index);
      }
      if (other.state != waiting.state || other.line != waiting.line || other.operation != waiting.operation) {
        fault("divergent flow: thread %u waits at line %d (%s), thread %u at line %d (%s)", stuck, waiting.line,
              waiting.operation, index, other.line, other.operation);
      }
    }
    fault("the emulation is wrong: all threads wait at line %d (%s)", waiting.line, waiting.operation);
  }

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  const std::function<void(uint32_t)>* body_ = nullptr;
  uint32_t count_ = 0;
  uint32_t first_in_grid_ = 0;
  uint32_t running_ = 0;
  uint32_t epoch_ = 0;
};

}  // namespace emulation
