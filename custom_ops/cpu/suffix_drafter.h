#pragma once
// Suffix decoding for the requests in the slots of a token table: what each one's text matched so far, and drafts.
// Knows no model and no strings.
#include <cstdint>
#include <memory>
#include <vector>

#include "draft_params.h"
#include "fdsd/status.h"
#include "suffix_cache.h"
#include "suffix_copy.h"
#include "suffix_draft.h"

namespace fdsd {

class SuffixDrafter;

// The state of a slot. Matches are carried from step to step: no text is looked up again.
struct SuffixRequest {
  // Bring `matches` in line with the salt's shards.
  void FollowShards();

  // Whether the text ends with `token` at this index.
  bool EndsWith(int32_t index, int32_t token) const;

  SuffixSalt* salt = nullptr;
  int32_t num_private = 0;  // leading tokens that are not shared
  int32_t first_end = 0;    // index of the first token that may end the text
  std::vector<int32_t> end_token_ids;
  bool has_ended = false;  // it has, and what is read from now on is not shared
  int32_t num_read = 0;    // committed tokens read so far
  SuffixAutomaton own;     // of the whole text
  SuffixTail tail;         // its end in `own`
  SuffixMatch match;       // its longest end that occurred before
  SuffixCopy copy;         // the same with replaced tokens put back
  int64_t first_shard = 0;
  std::vector<SuffixMatch> matches;  // in the salt's shards first_shard, ..: the longest end of the tokens read since
                                     // the shard began that occurred when the last of them was read
  SuffixWriter writer;               // of its output
};

struct SuffixCreateParams {
  int32_t num_slots;
  int32_t vocab_size;          // tokens are below it
  int32_t max_context;         // >= 1
  double max_factor;           // >= 0
  double min_token_prob;       // 0 .. 1
  int32_t follows_copies;      // 0 or 1
  int64_t max_cached_outputs;  // -1 = any number
  int64_t max_cached_bytes;    // >= 0
  SuffixDrafter** drafter;     // [1], to be destroyed with fdsd_suffix_destroy
};

// A request that comes into a slot; what the slot held is forgotten.
struct SuffixBeginParams {
  SuffixDrafter* drafter;
  int32_t slot;
  int32_t num_tokens;          // leading tokens that are not to be shared: the prompt, and output shared before
  const uint8_t* salt_digest;  // [16]
  int32_t first_end;           // index of the first token that may end the text
  int32_t num_end_token_ids;
  const int32_t* end_token_ids;  // [num_end_token_ids] any of these ends the text; what follows is not shared
};

// A slot that was not begun has max_draft_len 0 and is left alone.
using SuffixProposeParams = DraftProposeParams<SuffixDrafter>;
using SuffixSlotsParams = DraftSlotsParams<SuffixDrafter>;

// The shared sequences, oldest shard first.
struct SuffixSequencesParams {
  SuffixDrafter* drafter;
  int64_t num_sequences;  // Q
  int64_t num_tokens;     // N
  uint8_t* salt_digests;  // [Q, 16]
  int64_t* cu_tokens;     // [Q + 1]
  int32_t* token_ids;     // [N]
};

// Occurrences of a string in the texts that a slot drafts from; for inspection and tests.
struct SuffixCountParams {
  SuffixDrafter* drafter;
  int32_t slot;
  int32_t num_tokens;
  int32_t max_counts;  // room in counts
  const int32_t* token_ids;
  int64_t* counts;      // [max_counts] in its own text, then in its salt's shards, oldest first
  int32_t* num_counts;  // [1]
};

class SuffixDrafter {
 public:
  // Checks nothing; see CheckCreate.
  explicit SuffixDrafter(const SuffixCreateParams& p);

  static Error CheckCreate(const SuffixCreateParams& p);

  Error Begin(const SuffixBeginParams& p);

  // Forget what these slots matched; one that was not begun is ignored. What they shared stays.
  Error Forget(const int32_t* slots, int32_t count);

  // Arguments are checked before anything changes. Drafts do not depend on the number of threads.
  Error Propose(const SuffixProposeParams& p);

  SuffixStats stats() const { return cache_.stats(); }

  // Write the sequences into arrays of stats()'s sizes.
  Error Export(const SuffixSequencesParams& p) const;

  // Append sequences to the cache. Arguments are checked before anything changes.
  Error Import(const SuffixSequencesParams& p);

  // Write how often p.tokens occur in each text of a slot.
  Error Count(const SuffixCountParams& p) const;

  // Check all automata, the cache and the slots, in time proportional to their size.
  Error CheckIntegrity() const;

 private:
  struct Row;

  Error CheckSlots(const int32_t* slots, int32_t count) const;
  Error CheckTokens(const int32_t* tokens, int64_t count) const;
  Error CheckRow(const SuffixProposeParams& p, int32_t r) const;
  Error CheckRows(const SuffixProposeParams& p) const;
  Error CheckRequest(const SuffixRequest& request) const;
  std::vector<Row> MakeRows(const SuffixProposeParams& p) const;
  int32_t FirstMatched(const Row& row) const;
  void ReadToken(const SuffixAutomaton& own, int32_t token, SuffixMatch* match, SuffixCopy* copy) const;
  void ReadOwn(const Row& row) const;
  void ReadShared(const Row& row);
  void AddCopy(const Row& row, std::vector<SuffixSource>* sources) const;
  void Draft(Row* row) const;

  const SuffixRule rule_;
  const int32_t vocab_size_;
  SuffixCache cache_;
  std::vector<std::unique_ptr<SuffixRequest>> slots_;  // nullptr = not begun
};

}  // namespace fdsd
