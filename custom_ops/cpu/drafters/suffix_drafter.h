#pragma once
// Suffix decoding for the requests in the table rows of a token table: what each one's text matched so far, and drafts.
// Knows no model and no strings.
#include <cstdint>
#include <memory>
#include <vector>

#include "fdsd/draft.h"
#include "suffix_cache.h"
#include "suffix_draft.h"

namespace fdsd {

// The state of a table row. Matches are carried from step to step: no text is looked up again.
struct SuffixRequest {
  // Bring `matches` in line with the salt's shards.
  void FollowShards();

  // Whether the text ends with `token` at this index.
  bool EndsWith(int32_t index, int32_t token) const;

  SuffixSalt* salt = nullptr;
  int32_t num_private = 0;  // leading tokens that are no new output
  int32_t first_end = 0;    // index of the first token that may end the text
  std::vector<int32_t> end_token_ids;
  bool has_ended = false;  // it has, and what is read from now on is not shared
  int32_t num_read = 0;    // committed tokens read so far
  SuffixAutomaton own_text;
  SuffixTail tail;    // its end in `own_text`
  SuffixMatch match;  // its longest end that occurred before
  SuffixCopy copy;    // the same with replaced tokens put back
  int64_t first_shard = 0;
  std::vector<SuffixMatch> matches;  // in the salt's shards first_shard, ..: the longest end of the tokens read since
                                     // the shard began that occurred when the last of them was read
  SuffixWriter writer;               // of its output
};

class SuffixDrafter {
 public:
  // Checks nothing; see CheckCreate.
  explicit SuffixDrafter(const SuffixCreateParams& p);

  static Error CheckCreate(const SuffixCreateParams& p);

  Error Begin(const SuffixBeginParams& p);

  // Forget what these table rows matched; one that was not begun is ignored. What they shared stays.
  Error Forget(const int32_t* table_rows, int32_t count);

  // A table row that was not begun has max_draft_len 0 and is left alone. Arguments are checked before anything
  // changes. Drafts do not depend on the number of threads.
  Error Propose(const DraftProposeParams& p);

  SuffixStats stats() const { return cache_.stats(); }

  // Write the sequences into arrays of stats()'s sizes.
  Error Export(const SuffixSequencesParams& p) const;

  // Append sequences to the cache. Arguments are checked before anything changes.
  Error Import(const SuffixSequencesParams& p);

  // Write how often p.tokens occur in each text of a table row.
  Error Count(const SuffixCountParams& p) const;

  // Check all automata, the cache and the table rows, in time proportional to their size.
  Error CheckIntegrity() const;

 private:
  struct Row;

  Error CheckTableRows(const int32_t* table_rows, int32_t count) const;
  Error CheckTokens(const int32_t* tokens, int64_t count) const;
  Error CheckRow(const DraftProposeParams& p, int32_t r) const;
  Error CheckRows(const DraftProposeParams& p) const;
  Error CheckRequest(const SuffixRequest& request) const;
  std::vector<Row> MakeRows(const DraftProposeParams& p) const;
  int32_t FirstMatched(const Row& row) const;
  void ReadToken(const SuffixAutomaton& own_text, int32_t token, SuffixMatch* match, SuffixCopy* copy) const;
  void ReadOwn(const Row& row) const;
  static void PrefetchShared(const Row& row);
  void ReadShared(const Row& row);
  void ShareBeginning(const Row& row);
  void AddCopy(const Row& row, std::vector<SuffixSource>* sources) const;
  void Draft(Row* row) const;

  const SuffixRule rule_;
  const int32_t vocab_size_;
  SuffixCache cache_;
  std::vector<std::unique_ptr<SuffixRequest>> rows_;  // nullptr = not begun
};

}  // namespace fdsd
