#pragma once
// Where the n-grams of one growing text occurred last. Knows no table rows and no drafts; reads the text and keeps no
// copy of it.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fdsd/status.h"

namespace fdsd {

// The last `length` tokens of a text occurred before, where they end at `end`; length 0 = they did not.
struct NgramMatch {
  int32_t length = 0;
  int32_t end = 0;
  int32_t recent = 0;  // tokens of it after the last one that differs there; `length` where none does
};

// The latest end of every n-gram of one length in a growing text: a hash table of ends with open addressing. The n-gram
// itself is read from the text, so that a collision of hashes costs time and never gives a wrong match.
//
// An end e stands for text[e - n, e) and is at least n, so 0 is the empty cell. At most half of the cells are in use.
class NgramTable {
 public:
  // `multiplier` is odd; results do not depend on it. `keeps_earlier`: for Earlier.
  NgramTable(int32_t n, uint64_t multiplier, bool keeps_earlier);

  int32_t n() const { return n_; }

  // Index the n-grams that end at or before `end` and are not indexed yet. Where one that ends at e is not new,
  // before[end - e] becomes its latest earlier end; the others are left alone.
  void Extend(const int32_t* text, int32_t end, NgramMatch* before);

  // The latest indexed end of ngram[0, n), 0 if it was not indexed.
  int32_t Find(const int32_t* text, const int32_t* ngram) const;

  // The latest end of the same n-gram before an indexed end, 0 = there is none.
  int32_t Earlier(int32_t end) const { return earlier_[static_cast<size_t>(end)]; }

  // Check the table against a text whose n-grams up to `last_end` should be indexed, by definition.
  Error CheckIntegrity(const int32_t* text, int32_t last_end) const;

  int64_t num_bytes() const {
    return static_cast<int64_t>((cells_.capacity() + earlier_.capacity()) * sizeof(int32_t));
  }

 private:
  uint64_t Hash(const int32_t* ngram) const;
  // The hash of the n-gram one token further on.
  uint64_t Roll(uint64_t hash, int32_t leaving, int32_t entering) const;
  // The cell that holds the n-gram, or the empty one where it belongs.
  size_t CellOf(const int32_t* text, const int32_t* ngram, uint64_t hash) const;
  void Grow(const int32_t* text);

  int32_t n_;
  uint64_t multiplier_;
  uint64_t leaving_factor_;  // multiplier^n
  int32_t num_indexed_ = 0;  // n-grams that end at or before this are in the table
  size_t num_entries_ = 0;
  std::vector<int32_t> cells_;  // empty, or a power of two of them
  bool keeps_earlier_;
  std::vector<int32_t> earlier_;  // by end; empty unless kept
};

}  // namespace fdsd
