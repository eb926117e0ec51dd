#include "suffix_edges.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "random_multiplier.h"

namespace fdsd {
namespace {

// Units that a block's name can address.
constexpr int64_t kMaxUnits = (int64_t{1} << 26) - 1;

const uint64_t kMultiplier = RandomMultiplier();

// A pair of a hash table, 1 .. capacity - 1.
int32_t HomePair(int32_t token, int32_t capacity) {
  const uint64_t hash = (static_cast<uint64_t>(token) * kMultiplier) >> 32;
  return 1 + static_cast<int32_t>((hash * static_cast<uint64_t>(capacity - 1)) >> 32);
}

}  // namespace

SuffixEdges::SuffixEdges() { std::fill(free_, free_ + kNumClasses, -1); }

int32_t SuffixEdges::PairOf(const int32_t* tokens, int32_t capacity, int32_t token) {
  if (capacity <= kMaxSearched) {
    int32_t i = 0;
    while (i < capacity && tokens[i] != token && tokens[i] != kEmpty) ++i;
    return i;
  }
  int32_t i = HomePair(token, capacity);
  while (tokens[i] != token && tokens[i] != kEmpty) i = i + 1 < capacity ? i + 1 : 1;
  return i;
}

int32_t SuffixEdges::Find(int32_t block, int32_t token) const {
  const int32_t capacity = Capacity(block);
  const int32_t* tokens = &words_[Offset(block)];
  const int32_t i = PairOf(tokens, capacity, token);
  return i < capacity && tokens[i] == token ? tokens[capacity + i] : -1;
}

void SuffixEdges::Replace(int32_t block, int32_t token, int32_t target) {
  const int32_t capacity = Capacity(block);
  int32_t* tokens = &words_[Offset(block)];
  tokens[capacity + PairOf(tokens, capacity, token)] = target;
}

int32_t SuffixEdges::Make(int32_t token0, int32_t target0, int32_t token1, int32_t target1) {
  const int32_t block = Allocate(0);
  Insert(block, token0, target0);
  Insert(block, token1, target1);
  return block;
}

int32_t SuffixEdges::Add(int32_t block, int32_t token, int32_t target) {
  const int32_t grown = IsFull(block) ? Grow(block) : block;
  Insert(grown, token, target);
  return grown;
}

int32_t SuffixEdges::Copy(int32_t block) {
  const int32_t copy = Allocate(block & kClassMask);
  std::memcpy(&words_[Offset(copy)], &words_[Offset(block)],
              sizeof(int32_t) * 2 * static_cast<size_t>(Capacity(block)));
  return copy;
}

bool SuffixEdges::IsFull(int32_t block) const {
  const int32_t capacity = Capacity(block);
  const int32_t* tokens = &words_[Offset(block)];
  // A hash table is full at three quarters: a search then still ends after a few pairs.
  return capacity > kMaxSearched ? (tokens[0] + 1) * int64_t{4} > int64_t{3} * capacity
                                 : tokens[capacity - 1] != kEmpty;
}

int32_t SuffixEdges::Grow(int32_t block) {
  const int32_t grown = Allocate((block & kClassMask) + 1);
  ForEach(block, [&](int32_t token, int32_t target) { Insert(grown, token, target); });
  Free(block);
  return grown;
}

void SuffixEdges::Insert(int32_t block, int32_t token, int32_t target) {
  const int32_t capacity = Capacity(block);
  int32_t* tokens = &words_[Offset(block)];
  const int32_t i = PairOf(tokens, capacity, token);
  tokens[i] = token;
  tokens[capacity + i] = target;
  if (capacity > kMaxSearched) ++tokens[0];
}

int32_t SuffixEdges::Allocate(int32_t size_class) {
  if (size_class >= kNumClasses) throw std::bad_alloc();
  int32_t from = size_class;
  while (from < kNumClasses && free_[from] < 0) ++from;
  int64_t unit = 0;
  if (from < kNumClasses) {
    unit = free_[from];
    free_[from] = words_[unit * kUnitWords];
    // The upper halves of a larger block stay free.
    while (from > size_class) {
      --from;
      Free(static_cast<int32_t>(((unit + (int64_t{1} << from)) << kClassBits) | from));
    }
  } else {
    unit = words_.Extend(int64_t{kUnitWords} << size_class) / kUnitWords;
    if (unit + (int64_t{1} << size_class) > kMaxUnits) throw std::bad_alloc();
  }
  const auto block = static_cast<int32_t>((unit << kClassBits) | size_class);
  int32_t* tokens = &words_[Offset(block)];
  const int32_t capacity = Capacity(block);
  std::fill(tokens, tokens + capacity, kEmpty);
  if (capacity > kMaxSearched) tokens[0] = 0;
  return block;
}

void SuffixEdges::Free(int32_t block) {
  const int32_t size_class = block & kClassMask;
  words_[Offset(block)] = free_[size_class];
  free_[size_class] = block >> kClassBits;
}

}  // namespace fdsd
