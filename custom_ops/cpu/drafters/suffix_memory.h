#pragma once
// Arrays of plain values that grow in small steps without being copied, so that no step waits for a large one to move.
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace fdsd {

// Memory whose size changes in place: from the heap while small, then whole pages of its own, which the system moves by
// changing page tables.
class GrowingMemory {
 public:
  GrowingMemory() = default;
  ~GrowingMemory();
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  char* data() { return data_; }
  const char* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

  // Make it at least `needed` bytes, with some room to spare. Throws std::bad_alloc.
  void Grow(size_t needed);

  // Give back up to `wanted` bytes of its end and return how many; what the array held is lost.
  size_t Release(size_t wanted);

 private:
  void Resize(size_t num_bytes);

  char* data_ = nullptr;
  size_t num_bytes_ = 0;
};

// A growing array of T, in GrowingMemory.
template <typename T>
class MappedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  T& operator[](int64_t i) { return reinterpret_cast<T*>(memory_.data())[i]; }
  const T& operator[](int64_t i) const { return reinterpret_cast<const T*>(memory_.data())[i]; }
  int64_t size() const { return size_; }
  int64_t num_bytes() const { return static_cast<int64_t>(memory_.num_bytes()); }

  // Append `count` values that the caller sets, and return the index of the first. Moves the array.
  int64_t Extend(int64_t count) {
    const int64_t first = size_;
    const size_t needed = static_cast<size_t>(first + count) * sizeof(T);
    if (needed > memory_.num_bytes()) memory_.Grow(needed);  // may throw: the size is not to lie then
    size_ = first + count;
    return first;
  }

  // See GrowingMemory::Release; the array is not to be used any more.
  int64_t Release(int64_t wanted) {
    size_ = 0;
    return static_cast<int64_t>(memory_.Release(static_cast<size_t>(wanted)));
  }

 private:
  GrowingMemory memory_;
  int64_t size_ = 0;
};

}  // namespace fdsd
