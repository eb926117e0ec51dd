#pragma once
// What the calls of the draft policy look like: which of the offered drafts go into the next step.
#include "fdsd/status.h"

namespace fdsd {

class DraftPolicy;

struct PolicyCreateParams {
  int32_t num_table_rows;
  int32_t num_sources;         // S, 1 .. 8
  int32_t max_draft_len;       // 1 .. 64, longer offers are cut
  const int32_t* source_ids;   // [S] what draft_sources says of each
  const double* prior_logits;  // [S] added to what is believed of a source before anything of it was scored
  DraftPolicy** policy;        // [1], to be destroyed with fdsd_policy_destroy
};

struct PolicyTableRowsParams {
  DraftPolicy* policy;
  int32_t count;
  const int32_t* table_rows;  // [count]
};

// The rows of a step, and what every source offers for them: plane s of each array is source s's.
struct PolicyRowsParams {
  int32_t num_rows;              // R
  int32_t num_table_rows;        // rows of token_table
  int32_t max_tokens_per_row;    // columns of token_table
  const int32_t* token_table;    // [num_table_rows, max_tokens_per_row] committed tokens of each table row
  const int32_t* table_rows;     // [R] row of token_table, none twice
  const int32_t* num_tokens;     // [R] committed tokens, never fewer than in the table row's last step
  const int32_t* max_draft_len;  // [R] 0 = none
};

struct PolicyOffersParams {
  int32_t max_num_drafts;       // D, of one source
  int32_t max_num_rows;         // at least R
  const int32_t* token_ids;     // [S, D]
  const int32_t* cu_num_draft;  // [S, max_num_rows + 1], the first R + 1 of a plane count
  const int32_t* evidence;      // [S, max_num_rows, 3] see DraftEvidence
  const float* draft_prob;      // [S, D]
};

struct PolicyDecideParams {
  DraftPolicy* policy;
  PolicyRowsParams rows;
  PolicyOffersParams offers;
  int32_t num_outputs;       // requests that get a token in the next step without any draft, >= 0
  int32_t num_times;         // N >= 1
  const double* times;       // [N] > 0, rising: of the next step with so many drafts in it
  int32_t* draft_token_ids;  // [N - 1], the first cu_num_draft[R] are written
  int32_t* cu_num_draft;     // [R + 1]
  int8_t* draft_sources;     // [N - 1]
  double* outcome;           // [4] expected tokens and time of the step as decided, and without drafts
};

struct PolicyStatsParams {
  const DraftPolicy* policy;
  double* stats;  // [S, 7] see DraftPolicy::WriteStats
};

}  // namespace fdsd
