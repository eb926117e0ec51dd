#include "suffix_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace fdsd {
namespace {

constexpr size_t kPageBytes = 4096;
// From here on pages of its own: below the heap's own threshold for that, so the heap never copies a large block.
constexpr size_t kMinMappedBytes = 64 << 10;
// Bounds of a growth step: no cache full of tiny arrays that are mostly room to spare, and no long step.
constexpr size_t kMinStepBytes = 256;
constexpr size_t kMaxStepBytes = 256 << 10;

size_t RoundUp(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

char* MapPages(size_t num_bytes) {
  void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(pages);
}

}  // namespace

GrowingMemory::~GrowingMemory() { Release(num_bytes_); }

void GrowingMemory::Grow(size_t needed) {
  const size_t step = std::clamp(num_bytes_ / 4, kMinStepBytes, kMaxStepBytes);
  const size_t wanted = std::max(needed, num_bytes_ + step);
  Resize(wanted < kMinMappedBytes ? RoundUp(wanted, kMinStepBytes) : RoundUp(wanted, kPageBytes));
}

size_t GrowingMemory::Release(size_t wanted) {
  const size_t before = num_bytes_;
  if (before < kMinMappedBytes) {
    std::free(data_);
    data_ = nullptr;
    num_bytes_ = 0;
    return before;
  }
  const size_t released = std::min(before, RoundUp(wanted, kPageBytes));
  // What would be left is too little to be told from heap memory: all of it goes.
  const size_t left = before - released < kMinMappedBytes ? 0 : before - released;
  munmap(data_ + left, before - left);
  if (left == 0) data_ = nullptr;
  num_bytes_ = left;
  return before - left;
}

void GrowingMemory::Resize(size_t num_bytes) {
  void* moved = nullptr;
  if (num_bytes < kMinMappedBytes) {
    moved = std::realloc(data_, num_bytes);
    if (moved == nullptr) throw std::bad_alloc();
  } else if (num_bytes_ < kMinMappedBytes) {
    moved = MapPages(num_bytes);
    if (num_bytes_ > 0) std::memcpy(moved, data_, num_bytes_);
    std::free(data_);
  } else {
    moved = mremap(data_, num_bytes_, num_bytes, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) throw std::bad_alloc();
  }
  data_ = static_cast<char*>(moved);
  num_bytes_ = num_bytes;
}

}  // namespace fdsd
