#pragma once
// The calls of the drafters that read tokens only, whatever these keep.
#include "fdsd/call.h"

namespace fdsd {

class NgramIndex;
class PredictionDrafter;
class SuffixDrafter;

struct DraftTableRowsParams {
  void* drafter;  // NgramIndex, SuffixDrafter or PredictionDrafter
  int32_t count;
  const int32_t* table_rows;  // [count]
};
CallStatus NgramBegin(const DraftTableRowsParams& p);
CallStatus NgramForget(const DraftTableRowsParams& p);
CallStatus SuffixForget(const DraftTableRowsParams& p);
CallStatus PredictionForget(const DraftTableRowsParams& p);

// Read what is new in the rows of a step, and draft for them. Row r's text is its committed tokens, then its prefix.
struct DraftProposeParams {
  void* drafter;                    // NgramIndex, SuffixDrafter or PredictionDrafter
  int32_t num_rows;                 // R
  int32_t num_table_rows;           // rows of token_table
  int32_t max_tokens_per_row;       // columns of token_table
  int32_t max_num_drafts;           // room in draft_token_ids, at least the sum of max_draft_len
  const int32_t* token_table;       // [num_table_rows, max_tokens_per_row] committed tokens of each table row
  const int32_t* table_rows;        // [R] row of token_table, none twice
  const int32_t* num_tokens;        // [R] committed tokens, never fewer than in the table row's last step
  const int32_t* max_draft_len;     // [R] the prefix not counted
  const int32_t* prefix_token_ids;  // [cu_num_prefix[R]], nullptr = no request has one
  const int32_t* cu_num_prefix;     // [R + 1], nullptr = no request has one
  int32_t* draft_token_ids;         // [max_num_drafts], the first cu_num_draft[R] are drafts
  int32_t* cu_num_draft;            // [R + 1]
  int32_t* evidence;                // [R, 3] matched, recent, origin of each row's DraftEvidence; nullptr = unwanted
  float* draft_prob;                // as draft_token_ids: of each draft, see DraftEvidence; nullptr = unwanted
  int32_t* draft_parents;           // likewise: the row's draft that each one follows, -1 = none; nullptr = chains
};
CallStatus NgramPropose(const DraftProposeParams& p);
CallStatus SuffixPropose(const DraftProposeParams& p);
CallStatus PredictionPropose(const DraftProposeParams& p);

struct NgramCreateParams {
  int32_t num_table_rows;
  int32_t min_n;
  int32_t max_n;
  double max_factor;
  int32_t follows_copies;  // 0 or 1
  int32_t keeps_earlier;   // 0 or 1: whether all occurrences are known, as drafts that branch need
  NgramIndex** drafter;    // [1], to be destroyed with fdsd_ngram_destroy
};
CallStatus NgramCreate(const NgramCreateParams& p);

struct NgramCheckParams {
  const NgramIndex* index;
  int32_t num_table_rows;
  int32_t max_tokens_per_row;
  const int32_t* token_table;  // [num_table_rows, max_tokens_per_row]
};
CallStatus NgramCheckIntegrity(const NgramCheckParams& p);

struct PredictionCreateParams {
  int32_t num_table_rows;
  PredictionDrafter** drafter;  // [1], to be destroyed with fdsd_prediction_destroy
};
CallStatus PredictionCreate(const PredictionCreateParams& p);

// A request that comes into a table row; what the table row held is forgotten.
struct PredictionBeginParams {
  PredictionDrafter* drafter;
  int32_t table_row;
  int32_t first_output;  // index of the output's first token
  int32_t num_predicted;
  const int32_t* predicted;  // [num_predicted] what the output is expected to be
};
CallStatus PredictionBegin(const PredictionBeginParams& p);

struct SuffixCreateParams {
  int32_t num_table_rows;
  int32_t vocab_size;          // tokens are below it
  int32_t max_context;         // >= 1
  double max_factor;           // >= 0
  double min_token_prob;       // 0 .. 1
  int32_t follows_copies;      // 0 or 1
  int64_t max_cached_outputs;  // -1 = any number
  int64_t max_cached_bytes;    // >= 0
  SuffixDrafter** drafter;     // [1], to be destroyed with fdsd_suffix_destroy
};
CallStatus SuffixCreate(const SuffixCreateParams& p);

// A request that comes into a table row; what the table row held is forgotten.
struct SuffixBeginParams {
  SuffixDrafter* drafter;
  int32_t table_row;
  int32_t num_tokens;          // leading tokens that are no new output: the prompt, and output shared before. The last
                               // max_context of them are shared with the first token after them, in front of it.
  const uint8_t* salt_digest;  // [16]
  int32_t first_end;           // index of the first token that may end the text
  int32_t num_end_token_ids;
  const int32_t* end_token_ids;  // [num_end_token_ids] any of these ends the text; what follows is not shared
};
CallStatus SuffixBegin(const SuffixBeginParams& p);

// The shared sequences, oldest shard first.
struct SuffixSequencesParams {
  SuffixDrafter* drafter;
  int64_t num_sequences;  // Q
  int64_t num_tokens;     // N
  uint8_t* salt_digests;  // [Q, 16]
  int64_t* cu_tokens;     // [Q + 1]
  int32_t* token_ids;     // [N]
};
CallStatus SuffixExport(const SuffixSequencesParams& p);
CallStatus SuffixImport(const SuffixSequencesParams& p);

// Occurrences of a string in the texts that a table row drafts from; for inspection and tests.
struct SuffixCountParams {
  SuffixDrafter* drafter;
  int32_t table_row;
  int32_t num_tokens;
  int32_t max_counts;  // room in counts
  const int32_t* token_ids;
  int64_t* counts;      // [max_counts] in its own text, then in its salt's shards, oldest first
  int32_t* num_counts;  // [1]
};
CallStatus SuffixCount(const SuffixCountParams& p);

struct SuffixStats {
  int64_t num_bytes;  // of everything kept, what was dropped and not yet given back included
  int64_t num_tokens;
  int64_t num_outputs;
  int64_t num_sequences;  // pieces of outputs: one that was continued in a younger shard counts in both
  int64_t num_shards;
  int64_t num_salts;
  int64_t num_steps;       // elementary steps of all appends ever
  int64_t num_cut_counts;  // see SuffixAutomaton
};

}  // namespace fdsd
