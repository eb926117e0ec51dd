#pragma once
// The latest of many values.
#include <algorithm>
#include <array>
#include <cstddef>

namespace fdsd {

// At most kMost values: where there is no room for another one the oldest is dropped. Allocates nothing.
template <typename T, size_t kMost>
class LatestValues {
 public:
  void Add(T value) {
    if (count_ == kMost) DropOldest();
    values_[(begin_ + count_) % kMost] = value;
    ++count_;
  }

  // There must be one.
  void DropOldest() {
    begin_ = (begin_ + 1) % kMost;
    --count_;
  }

  void Clear() { count_ = 0; }

  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }

  // The i-th, from the oldest on.
  T operator[](size_t i) const { return values_[(begin_ + i) % kMost]; }

  // The i-th, from the least on.
  T Ranked(size_t i) const {
    std::array<T, kMost> sorted{};
    for (size_t k = 0; k < count_; ++k) sorted[k] = (*this)[k];
    std::nth_element(sorted.begin(), sorted.begin() + i, sorted.begin() + count_);
    return sorted[i];
  }

 private:
  std::array<T, kMost> values_{};
  size_t begin_ = 0, count_ = 0;
};

}  // namespace fdsd
