#pragma once
// An array that grows and is emptied in every step. Knows nothing of what is in it.
#include <cstddef>
#include <vector>

namespace fdsd {

// Keeps its memory, and sets no element that is added: a std::vector sets all of them.
template <typename T>
class GrowingArray {
 public:
  // Add elements at the end, whose values are anything. Returns the first; others may lie elsewhere afterwards.
  T* Extend(size_t count) {
    const size_t first = size_;
    size_ += count;
    if (memory_.size() < size_) memory_.resize(2 * size_);
    return memory_.data() + first;
  }
  void Cut(size_t size) { size_ = size; }

  size_t size() const { return size_; }
  T* data() { return memory_.data(); }
  const T* data() const { return memory_.data(); }
  const T& operator[](size_t i) const { return memory_[i]; }

 private:
  std::vector<T> memory_;
  size_t size_ = 0;
};

}  // namespace fdsd
