#pragma once
// The transitions of automaton states that have several: one block of (token, target) pairs per state. Knows no states.
#include <cstdint>

#include "suffix_memory.h"

namespace fdsd {

// Blocks of 2, 4, 8, .. pairs, all tokens first, then all targets. Up to 8 pairs are searched in order; larger blocks
// are hash tables with open addressing, whose pair 0 holds the number of entries in place of a token. A block that its
// state has outgrown is used again, whole or in halves, for others.
//
// A block's name is (offset / 4) << 5 | size class, non-negative; it changes when the block grows.
class SuffixEdges {
 public:
  SuffixEdges();

  // Name of a new block with two pairs of different tokens.
  int32_t Make(int32_t token0, int32_t target0, int32_t token1, int32_t target1);

  // The target of a token, -1 if it has none.
  int32_t Find(int32_t block, int32_t token) const;

  // Set the target of a token that has one.
  void Replace(int32_t block, int32_t token, int32_t target);

  // Add a pair whose token has none; returns the block's name from now on.
  int32_t Add(int32_t block, int32_t token, int32_t target);

  // Name of a new block with the same pairs.
  int32_t Copy(int32_t block);

  // Call visit(token, target) for every pair.
  template <typename Visit>
  void ForEach(int32_t block, Visit&& visit) const {
    const int32_t capacity = Capacity(block);
    const int32_t* tokens = &words_[Offset(block)];
    for (int32_t i = FirstPair(capacity); i < capacity; ++i) {
      if (tokens[i] != kEmpty) visit(tokens[i], tokens[capacity + i]);
    }
  }

  // Pairs that a block has room for, in use or not: what copying it costs.
  static int32_t Capacity(int32_t block) { return 2 << (block & kClassMask); }

  int64_t num_bytes() const { return words_.num_bytes(); }
  int64_t Release(int64_t wanted) { return words_.Release(wanted); }

 private:
  static constexpr int32_t kEmpty = -1;
  static constexpr int32_t kClassBits = 5;
  static constexpr int32_t kClassMask = (1 << kClassBits) - 1;
  static constexpr int32_t kNumClasses = 24;
  static constexpr int32_t kUnitWords = 4;  // the smallest block: two pairs
  static constexpr int32_t kMaxSearched = 8;

  static int64_t Offset(int32_t block) { return static_cast<int64_t>(block >> kClassBits) * kUnitWords; }
  static int32_t FirstPair(int32_t capacity) { return capacity > kMaxSearched ? 1 : 0; }
  // Where a token's pair is, or where it belongs; `capacity` if a block without hashing is full.
  static int32_t PairOf(const int32_t* tokens, int32_t capacity, int32_t token);

  int32_t Allocate(int32_t size_class);
  void Free(int32_t block);
  bool IsFull(int32_t block) const;
  int32_t Grow(int32_t block);
  void Insert(int32_t block, int32_t token, int32_t target);

  MappedArray<int32_t> words_;
  int32_t free_[kNumClasses];  // offset / 4 of the first free block of a class, -1 = none; its word 0 is the next one's
};

}  // namespace fdsd
