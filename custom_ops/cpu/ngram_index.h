#pragma once
// Where the n-grams of growing texts occurred last, and drafts copied from there. Knows no requests, only slots; reads
// the texts and keeps no copy of them.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft_params.h"
#include "fdsd/status.h"

namespace fdsd {

class NgramIndex;

// Every slot was begun.
using NgramProposeParams = DraftProposeParams<NgramIndex>;
using NgramSlotsParams = DraftSlotsParams<NgramIndex>;

// The latest end of every n-gram of one length in a growing text: a hash table of ends with open addressing. The n-gram
// itself is read from the text, so that a collision of hashes costs time and never gives a wrong match.
//
// An end e stands for text[e - n, e) and is at least n, so 0 is the empty cell. At most half of the cells are in use.
class NgramTable {
 public:
  // `multiplier` is odd; results do not depend on it.
  NgramTable(int32_t n, uint64_t multiplier);

  int32_t n() const { return n_; }

  // Index the n-grams that end at or before `end` and are not indexed yet.
  void Extend(const int32_t* text, int32_t end);

  // The latest indexed end of ngram[0, n), 0 if it was not indexed.
  int32_t Find(const int32_t* text, const int32_t* ngram) const;

  // Check the table against a text whose n-grams up to `last_end` should be indexed, by definition.
  Error CheckIntegrity(const int32_t* text, int32_t last_end) const;

  int64_t num_bytes() const { return static_cast<int64_t>(cells_.capacity() * sizeof(int32_t)); }

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
};

// One table per n and slot in use. Calls must not overlap.
class NgramIndex {
 public:
  // Requires 1 <= min_n <= max_n and num_slots >= 0.
  NgramIndex(int32_t num_slots, int32_t min_n, int32_t max_n);

  // Empty the slots' tables and start anew.
  Error Begin(const int32_t* slots, int32_t count);

  // Free the slots' tables; a slot that is not in use is ignored.
  Error Forget(const int32_t* slots, int32_t count);

  // Index the new committed tokens of every row, then look for the longest end of its text, of min_n .. max_n tokens,
  // that occurred before among the committed tokens. What followed its latest occurrence becomes the draft; where that
  // runs into the end of the text, it goes on with what was just drafted, so a repeated phrase is repeated further.
  // Arguments are checked before anything is changed.
  Error Propose(const NgramProposeParams& p);

  // Check every slot in use against token_table[num_slots, max_tokens_per_row], by definition.
  Error CheckIntegrity(const int32_t* token_table, int32_t num_slots, int32_t max_tokens_per_row) const;

  // Memory of all tables.
  int64_t num_bytes() const;

 private:
  struct Slot {
    bool in_use = false;
    int32_t num_tokens = 0;  // committed tokens when the slot was last seen; n-grams that end before are indexed
    std::vector<NgramTable> tables;  // by rising n
  };
  struct Text;

  Error CheckSlots(const int32_t* slots, int32_t count) const;
  Error CheckRow(const NgramProposeParams& p, int32_t r) const;
  Error CheckRows(const NgramProposeParams& p) const;
  // The end of the latest occurrence, 0 if there is none.
  int32_t LatestOccurrence(const Slot& slot, const Text& text);

  const int32_t min_n_;
  const int32_t max_n_;
  const uint64_t multiplier_;
  std::vector<Slot> slots_;
  std::vector<int32_t> tail_;  // the last tokens of a text with a prefix, at most max_n
};

}  // namespace fdsd
