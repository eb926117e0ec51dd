#pragma once
// Where the n-grams of growing texts occurred last, and drafts copied from there. Knows no requests, only table rows;
// reads the texts and keeps no copy of them.
#include <cstdint>
#include <vector>

#include "fdsd/draft.h"
#include "ngram_copy.h"
#include "ngram_table.h"

namespace fdsd {

struct NgramRule {
  int32_t min_n;        // tokens of the text's end that are looked up, at least: >= 1
  int32_t max_n;        // at most: >= min_n
  double max_factor;    // drafts per token that agreed, at most: > 0
  bool follows_copies;  // see NgramCopy; without, every step looks up anew
  bool keeps_earlier;   // whether drafts may branch: all occurrences are known
};

// One table per n and table row in use. Calls must not overlap.
class NgramIndex {
 public:
  // Requires num_table_rows >= 0.
  NgramIndex(int32_t num_table_rows, const NgramRule& rule);

  // Empty the table rows' tables and start anew.
  Error Begin(const int32_t* table_rows, int32_t count);

  // Free the table rows' tables; a table row that is not in use is ignored.
  Error Forget(const int32_t* table_rows, int32_t count);

  // Index the new committed tokens of every row. Then look for the longest end of its text, of min_n .. max_n tokens,
  // that occurred before among the committed tokens. The draft is what followed its latest occurrence, or what goes on
  // with the copy that the text ends with. A draft that runs into the end of the text goes on with its own tokens, so a
  // repeated phrase is repeated further. Arguments are checked before anything is changed. See BranchRow for trees.
  Error Propose(const DraftProposeParams& p);

  // Check every table row in use against token_table[num_table_rows, max_tokens_per_row], by definition.
  Error CheckIntegrity(const int32_t* token_table, int32_t num_table_rows, int32_t max_tokens_per_row) const;

  // Memory of all tables.
  int64_t num_bytes() const;

 private:
  struct Row {
    bool in_use = false;
    int32_t num_tokens = 0;          // committed tokens when the table row was last seen
    int32_t num_indexed = 0;         // all of them but the last
    NgramCopy copy;                  // of the indexed tokens
    std::vector<NgramTable> tables;  // by rising n
  };
  // Committed tokens, then a prefix, then what has been drafted so far.
  struct Text {
    const int32_t* committed;
    int32_t num_committed;
    const int32_t* prefix;
    int32_t num_prefix;

    Text(const DraftProposeParams& p, int32_t r)
        : committed(p.token_table + static_cast<int64_t>(p.table_rows[r]) * p.max_tokens_per_row),
          num_committed(p.num_tokens[r]),
          prefix(nullptr),
          num_prefix(0) {
      if (p.cu_num_prefix == nullptr) return;
      prefix = p.prefix_token_ids + p.cu_num_prefix[r];
      num_prefix = p.cu_num_prefix[r + 1] - p.cu_num_prefix[r];
    }

    // Drafts excluded.
    int64_t size() const { return static_cast<int64_t>(num_committed) + num_prefix; }

    // committed [0, num_committed), prefix [num_committed, size), drafts [size, ..)
    int32_t at(int64_t i, const int32_t* drafts) const {
      if (i < num_committed) return committed[i];
      return i < size() ? prefix[i - num_committed] : drafts[i - size()];
    }

    // The end of an array whose last `count` tokens are those before `end`; `copy` is it where they lie in two.
    const int32_t* EndOf(int64_t end, int64_t count, std::vector<int32_t>* copy) const {
      if (end <= num_committed) return committed + end;
      copy->clear();
      for (int64_t i = end - count; i < end; ++i) copy->push_back(at(i, nullptr));
      return copy->data() + count;
    }
  };

  Error CheckTableRows(const int32_t* table_rows, int32_t count) const;
  Error CheckRow(const DraftProposeParams& p, int32_t r) const;
  Error CheckRows(const DraftProposeParams& p) const;
  // Index the table row's tokens before `end`.
  void Index(const int32_t* text, int32_t end, Row* table_row) const;
  // Where an n-gram of the table's length that ends at `end` occurred last among the committed tokens, 0 = nowhere.
  static int32_t FindEnd(const NgramTable& table, const Text& text, const int32_t* text_end, int64_t end);
  // The longest n-gram that ends at `end`, after all indexed ones, and that occurs among the committed tokens.
  NgramMatch LookUp(const Row& table_row, const Text& text, int64_t end) const;
  // What the whole text is to be continued from.
  NgramMatch Source(const Row& table_row, const Text& text) const;
  // Of one row, which changes nothing but its own: write drafts and their source; returns how many.
  int32_t ProposeRow(const DraftProposeParams& p, int32_t r, NgramMatch* source);
  // Write what followed the latest few occurrences of the text's end as a tree, those of its longest end first. A
  // token's probability is the share of the occurrences before it that it followed, the longer ones counting more.
  int32_t BranchRow(const DraftProposeParams& p, int32_t r, const Text& text, NgramMatch source) const;

  const NgramRule rule_;
  const uint64_t multiplier_;
  std::vector<Row> rows_;
  // Of the rows of a step.
  std::vector<int64_t> begins_;      // where their drafts are written at first; [R+1]
  std::vector<NgramMatch> sources_;  // [R]
};

}  // namespace fdsd
