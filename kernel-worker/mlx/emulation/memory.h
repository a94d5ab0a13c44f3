// Memory as the kernels see it, every access checked.
//
// Device buffers and threadgroup arrays are not pointers but types that check the index. An output remembers which
// thread wrote each element, a threadgroup array also when and who read it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "threads.h"

namespace emulation {

constexpr size_t MAXIMUM_THREADGROUP_BYTES = 32 << 10;
constexpr uint32_t NOBODY = UINT32_MAX;
constexpr uint32_t SEVERAL = UINT32_MAX - 1;

template <class Index>
uint64_t checked(const char* name, Index index, uint64_t count) {
  static_assert(std::is_integral_v<Index>);
  if constexpr (std::is_signed_v<Index>) {
    if (index < 0) {
      fault("%s[%lld] is out of bounds", name, static_cast<long long>(index));
    }
  }
  if (uint64_t(index) >= count) {
    fault("%s[%llu] is out of bounds: it has %llu elements", name, static_cast<unsigned long long>(index),
          static_cast<unsigned long long>(count));
  }
  return uint64_t(index);
}

// An input: can be read only.
template <class T>
class Input {
 public:
  Input(const char* name, const T* elements, uint64_t count) : name_(name), elements_(elements), count_(count) {}

  template <class Index>
  T operator[](Index index) const {
    return elements_[checked(name_, index, count_)];
  }

 private:
  const char* name_;
  const T* elements_;
  uint64_t count_;
};

// An output: can be written only, each element by one thread of the whole grid.
template <class T>
class Output {
 public:
  class Element {
   public:
    Element(T& value, uint32_t& writer, const char* name, uint64_t index)
        : value_(value), writer_(writer), name_(name), index_(index) {}

    void operator=(T value) const {
      uint32_t thread = Threads::current().index_in_grid();
      if (writer_ != NOBODY && writer_ != thread) {
        fault("race: threads %u and %u of the grid both write %s[%llu]", writer_, thread, name_, index_);
      }
      writer_ = thread;
      value_ = value;
    }

   private:
    T& value_;
    uint32_t& writer_;
    const char* name_;
    unsigned long long index_;
  };

  Output(const char* name, T* elements, uint32_t* writers, uint64_t count)
      : name_(name), elements_(elements), writers_(writers), count_(count) {}

  template <class Index>
  Element operator[](Index index) const {
    uint64_t at = checked(name_, index, count_);
    return Element(elements_[at], writers_[at], name_, at);
  }

 private:
  const char* name_;
  T* elements_;
  uint32_t* writers_;
  uint64_t count_;
};

template <class T>
struct Cell {
  T value{};
  uint32_t writer = NOBODY;
  uint32_t write_epoch = 0;
  uint32_t reader = NOBODY;
  uint32_t read_epoch = 0;
};

struct AnyArray {
  virtual ~AnyArray() = default;
};

template <class T>
struct CellArray : AnyArray {
  std::vector<Cell<T>> cells;
};

// The arrays of the running threadgroup, by the line that declares them and their name. Forgotten when the next threadgroup starts.
class ThreadgroupMemory {
 public:
  static ThreadgroupMemory& current() {
    static ThreadgroupMemory memory;
    return memory;
  }

  void start_threadgroup() {
    arrays_.clear();
    bytes_ = 0;
  }

  template <class T>
  std::vector<Cell<T>>& array(const char* name, uint64_t length, int line) {
    std::unique_ptr<AnyArray>& entry = arrays_[{line, name}];
    if (!entry) {
      bytes_ += length * sizeof(T);
      if (bytes_ > MAXIMUM_THREADGROUP_BYTES) {
        fault("%s brings threadgroup memory to %zu bytes; Metal has %zu", name, bytes_, MAXIMUM_THREADGROUP_BYTES);
      }
      auto fresh = std::make_unique<CellArray<T>>();
      fresh->cells.resize(length);
      entry = std::move(fresh);
    }
    return static_cast<CellArray<T>&>(*entry).cells;
  }

 private:
  std::map<std::pair<int, std::string>, std::unique_ptr<AnyArray>> arrays_;
  size_t bytes_ = 0;
};

// An array that the threads of a threadgroup share. What one thread writes another may read only after a barrier, and
// what one reads another may overwrite only after a barrier.
template <class T>
class ThreadgroupArray {
 public:
  class Element {
   public:
    Element(Cell<T>& cell, const char* name, uint64_t index) : cell_(cell), name_(name), index_(index) {}

    operator T() const {
      auto [thread, epoch] = now();
      if (cell_.writer == NOBODY) {
        fault("%s[%llu] is read by thread %u before anything was written there", name_, index_, thread);
      }
      if (cell_.writer != thread && cell_.write_epoch == epoch) {
        fault("race: no barrier between thread %u writing %s[%llu] and thread %u reading it", cell_.writer, name_, index_,
              thread);
      }
      bool others = cell_.read_epoch == epoch && cell_.reader != thread;
      cell_.reader = others ? SEVERAL : thread;
      cell_.read_epoch = epoch;
      return cell_.value;
    }

    void operator=(T value) const {
      auto [thread, epoch] = now();
      if (cell_.write_epoch == epoch && cell_.writer != thread) {
        fault("race: no barrier between threads %u and %u writing %s[%llu]", cell_.writer, thread, name_, index_);
      }
      if (cell_.read_epoch == epoch && cell_.reader != thread) {
        fault("race: no barrier between another thread reading %s[%llu] and thread %u writing it", name_, index_, thread);
      }
      cell_ = {value, thread, epoch, cell_.reader, cell_.read_epoch};
    }

   private:
    static std::pair<uint32_t, uint32_t> now() {
      const Threads& threads = Threads::current();
      return {threads.index(), threads.epoch()};
    }

    Cell<T>& cell_;
    const char* name_;
    unsigned long long index_;
  };

  ThreadgroupArray(const char* name, uint64_t length, int line)
      : name_(name), cells_(&ThreadgroupMemory::current().array<T>(name, length, line)) {}

  template <class Index>
  Element operator[](Index index) const {
    uint64_t at = checked(name_, index, cells_->size());
    return Element((*cells_)[at], name_, at);
  }

 private:
  const char* name_;
  std::vector<Cell<T>>* cells_;
};

}  // namespace emulation

#define THREADGROUP_ARRAY(type, name, length) \
  const emulation::ThreadgroupArray<type> name(#name, uint64_t(length), __LINE__)
