#pragma once
// Several arrays in one piece of scratch memory.
#include <cstdint>

namespace fdsd {
namespace FDSD_ISA {

// Hands out consecutive arrays, each 64-byte aligned. Run once with base = nullptr to learn the size.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + size_);
    size_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return array;
  }
  int64_t size() const { return size_; }

 private:
  char* base_;
  int64_t size_ = 0;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
