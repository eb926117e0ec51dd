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
  const double* prior_logits;  // [S] added to the logits of a source before anything of it was scored
  // [S] addresses of the source's drafter and of the function that takes its DraftProposeParams: the policy asks it
  // itself. 0 = the caller writes its plane of the offers.
  const uint64_t* drafters;
  const uint64_t* proposes;
  DraftPolicy** policy;  // [1], to be destroyed with fdsd_policy_destroy
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
  const int32_t* max_draft_len;  // [R] 0 = none, the prefix not counted
  // Drafts that are certain, which the offers follow. All nullptr = nobody has any.
  const int32_t* prefix_token_ids;  // [cu_num_prefix[R]]
  const int32_t* cu_num_prefix;     // [R + 1]
  const int8_t* prefix_sources;     // [cu_num_prefix[R]] what draft_sources says of each
};

struct PolicyOffersParams {
  int32_t max_num_drafts;  // D, of one source
  int32_t max_num_rows;    // at least R
  int32_t* token_ids;      // [S, D]
  int32_t* cu_num_draft;   // [S, max_num_rows + 1], the first R + 1 of a plane count
  int32_t* evidence;       // [S, max_num_rows, 3] see DraftEvidence
  float* draft_prob;       // [S, D]
};

// What the next step takes with d drafts in it beside everything else: curve[num_step_rows + d] + fixed +
// d * per_draft, and any_draft more where d > 0, in any unit.
struct PolicyTimesParams {
  int32_t num_step_rows;  // of the step without drafts, >= 0
  int32_t num_times;      // more than num_step_rows; a step has fewer rows than this
  const double* curve;    // [num_times] by rows of the step; from num_step_rows on rising, and > 0 with `fixed`
  double fixed;
  double per_draft;  // >= 0
  double any_draft;  // >= 0
};

// What a decision's time goes into.
enum class PolicyPhase : int32_t { kCheck, kAsk, kScore, kPredict, kFill };

// The rows are scored and the native drafters asked (offer), then drafts are chosen (choose); `decide` is both. Whoever
// writes planes himself does so before `choose`, knowing what `offer` found. `ask` tells whether there is anything to
// decide on.
struct PolicyDecideParams {
  DraftPolicy* policy;
  PolicyRowsParams rows;
  PolicyOffersParams offers;
  PolicyTimesParams times;
  int32_t num_outputs;       // requests that get a token in the next step without any draft, >= 0
  int32_t max_num_chosen;    // M >= 0: drafts of a step at most
  double least_gain;         // >= 1, that guesses must be expected to bring: tokens per time over those without any
  int32_t* draft_token_ids;  // [M], the first cu_num_draft[R] are written, prefixes included
  int32_t* cu_num_draft;     // [R + 1]
  int8_t* draft_sources;     // [M]
  uint64_t skipped_sources;  // bit s: the drafter of source s is not asked, and it offers nothing
  double* outcome;           // [5] see DraftPolicy::Choose
  // [5] seconds of every PolicyPhase, which those of this call are added to; nullptr = nobody measures.
  double* phase_seconds;
};

// Whether a source whose plane the caller writes is to be asked, between `offer` and `choose`; see DraftWants.
struct PolicyWantsParams {
  const DraftPolicy* policy;
  int32_t source;
  int32_t num_rows;              // R, those of `offer`
  const int32_t* table_rows;     // [R]
  const int32_t* max_draft_len;  // [R] that the source may draft, 0 = none
  PolicyTimesParams times;       // without the call
  int32_t num_outputs;           // as in PolicyDecideParams
  int32_t max_num_chosen;        // likewise
  int32_t max_drafts;            // K, of a row
  // A call for k drafts of n rows: first + per_row * n + (k - 1) * (per_pass + per_pass_row * n), in the unit of
  // `times`.
  struct Call {
    double first;
    double per_row;
    double per_pass;
    double per_pass_row;
  } call;
  const double* catch_up;       // [R] >= 0, what a call takes more for the row, as it is behind
  double min_acceptance_prior;  // the least acceptance probability assumed of a draft, 0 .. 1
  int32_t* num_wanted;          // [R] becomes 0 .. K
  double* outcome;  // [3] the expected gain, 1 = nothing is wanted; drafts less probable together end a row;
                    // how many drafts the others offer
};

struct PolicyStatsParams {
  const DraftPolicy* policy;
  double* stats;  // [S, 7] see DraftPolicy::WriteStats
};

}  // namespace fdsd
