#pragma once
// The calls of the draft controller, which decides in every step which of the offered drafts are verified.
#include "fdsd/call.h"

namespace fdsd {

class DraftController;

struct ControllerCreateParams {
  int32_t num_table_rows;
  int32_t num_sources;         // S, 1 .. 8
  int32_t max_draft_len;       // 1 .. 64, longer offers are cut
  int32_t makes_trees;         // 0 or 1: whether a row's offers become one tree; else one of them is chosen
  const int32_t* source_ids;   // [S] what draft_sources says of each
  const double* prior_logits;  // [S] added to the logits of a source before anything of it was scored
  // [S] addresses of the source's drafter and of the function that takes its DraftProposeParams: the controller asks it
  // itself. 0 = the caller writes its plane of the offers.
  const uint64_t* drafters;
  const uint64_t* proposes;
  uint64_t covered_sources;      // bit s: what source s drafts others nearly always do as well; see OnlineEstimator
  DraftController** controller;  // [1], to be destroyed with fdsd_controller_destroy
};
CallStatus ControllerCreate(const ControllerCreateParams& p);

struct ControllerTableRowsParams {
  DraftController* controller;
  int32_t count;
  const int32_t* table_rows;  // [count]
};
CallStatus ControllerBegin(const ControllerTableRowsParams& p);
CallStatus ControllerForget(const ControllerTableRowsParams& p);

// What steps take, as it was measured: of `rows` tokens, of all requests together; equally many of each, or 0 requests
// = a part of a prompt. See CostTables.
struct ControllerCostParams {
  DraftController* controller;
  int32_t max_num_rows;     // of a step, >= 1
  int32_t num_samples;      // n
  const int32_t* rows;      // [n]
  const int32_t* requests;  // [n]
  const int32_t* contexts;  // [n] >= 0, tokens of each request before its rows
  const double* ms;         // [n] > 0
};
CallStatus ControllerTakeCosts(const ControllerCostParams& p);

// The rows of a step, and what every source offers for them: plane s of each array is source s's.
struct ControllerRowsParams {
  int32_t num_rows;              // R
  int32_t num_table_rows;        // rows of token_table
  int32_t max_tokens_per_row;    // columns of token_table
  const int32_t* token_table;    // [num_table_rows, max_tokens_per_row] committed tokens of each table row
  const int32_t* table_rows;     // [R] row of token_table, none twice
  const int32_t* num_tokens;     // [R] committed tokens, never fewer than in the table row's last step
  const int32_t* max_draft_len;  // [R] 0 = none, the prefix not counted
  // Drafts that are certain, which the offers follow. All nullptr = there are none.
  const int32_t* prefix_token_ids;  // [cu_num_prefix[R]]
  const int32_t* cu_num_prefix;     // [R + 1]
  const int8_t* prefix_sources;     // [cu_num_prefix[R]] what draft_sources says of each
};

struct ControllerOffersParams {
  int32_t max_num_drafts;  // D, of one source
  int32_t max_num_rows;    // at least R
  int32_t* token_ids;      // [S, D]
  int32_t* cu_num_draft;   // [S, max_num_rows + 1], the first R + 1 of a plane count
  int32_t* evidence;       // [S, max_num_rows, 3] see DraftEvidence
  float* draft_prob;       // [S, D]
  int32_t* parents;        // [S, D] see DraftProposeParams; nullptr = chains, as where no trees are made
};

// What the next step takes with d drafts in it: curve[num_step_rows + d] + fixed + d * per_draft, and any_draft more
// where d > 0, in any unit.
struct ControllerTimesParams {
  int32_t num_step_rows;  // of the step without drafts, >= 0
  int32_t num_times;      // more than num_step_rows; a step has fewer rows than this
  const double* curve;    // [num_times] by rows of the step; from num_step_rows on rising, and > 0 with `fixed`
  double fixed;
  double per_draft;  // >= 0
  double any_draft;  // >= 0
};

struct ControllerDecideParams {
  DraftController* controller;
  ControllerRowsParams rows;
  ControllerOffersParams offers;
  ControllerTimesParams times;
  int32_t num_outputs;       // requests that get a token in the next step without any draft, >= 0
  int32_t max_num_chosen;    // M >= 0: drafts of a step at most
  double least_gain;         // >= 1, that guesses must be expected to bring: tokens per time over those without any
  int32_t* draft_token_ids;  // [M], the first cu_num_draft[R] are written, prefixes included
  int32_t* cu_num_draft;     // [R + 1]
  int8_t* draft_sources;     // [M]
  int32_t* draft_parents;    // [M], nullptr where no trees are made
  uint64_t skipped_sources;  // bit s: the drafter of source s is not asked, and it offers nothing
  double* outcome;           // [6] see DraftPolicy::Choose
};
// Tell how many drafts there are to decide on; score nothing.
CallStatus ControllerAsk(const ControllerDecideParams& p);
// Score the rows, and ask the native drafters. A caller that writes planes of its own does so after this.
CallStatus ControllerOffer(const ControllerDecideParams& p);
// Choose among what is offered.
CallStatus ControllerChoose(const ControllerDecideParams& p);
// Offer, then choose.
CallStatus ControllerDecide(const ControllerDecideParams& p);

// Whether a source whose plane the caller writes is to be asked, between `offer` and `choose`; see DraftWants.
struct ControllerWantsParams {
  const DraftController* controller;
  int32_t source;
  int32_t num_rows;              // R, those of `offer`
  const int32_t* table_rows;     // [R]
  const int32_t* max_draft_len;  // [R] that the source may draft, 0 = none
  ControllerTimesParams times;   // without the call
  int32_t num_outputs;           // as in ControllerDecideParams
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
  const double* catch_up;       // [R] >= 0, what a call takes more for the row, whose KV lags
  double min_acceptance_prior;  // the least acceptance probability assumed of a draft, 0 .. 1
  int32_t* num_wanted;          // [R] becomes 0 .. K
  double* outcome;  // [3] the expected gain, 1 = nothing is wanted; drafts less probable together end a row;
                    // how many drafts the others offer
};
CallStatus ControllerWants(const ControllerWantsParams& p);

// A step that is over, and the one ahead, of the rows that drafts are chosen for: `next` says which.
struct ControllerStepParams {
  struct Step {
    int32_t num_requests;       // that the model ran
    int32_t num_rows;           // tokens, drafts and parts of prompts included
    int32_t num_prompt_tokens;  // of them in parts of prompts
    int32_t num_forbidden;      // of the requests those that allow no drafts
    int32_t num_skipped_steps;  // steps up to this one without a call: it is the only one known of them
    int32_t goes_on;            // the step before it had the same rows
    int32_t is_certain;         // all of its drafts were, which says nothing of guesses
  } step;
  struct Times {
    double seconds;       // that it took, drafting left out
    double host_seconds;  // between it and the step before, drafting left out
    double asking_s;      // that choosing its drafts took
    double lookup_s;      // that asking look-ups and choosing took when they were asked last; 0 = never
    double choosing_s;    // the same without draft layers; 0 = there were no drafts
    double time;          // expected when they were chosen, as the times below; 0 = nothing was
    double plain_time;    // likewise of the step without drafts
  } took;
  int32_t num_prompt_tokens_ahead;  // of the next step, as far as is known
  int32_t decides;                  // where drafts are allowed and may be worth it, they are chosen as well
  ControllerDecideParams* next;     // its `times`, what follows and `skipped_sources` become those of the step ahead
  double* outcome;                  // [9] see OnlineEstimator::StepForecast
};
CallStatus ControllerStep(const ControllerStepParams& p);

struct ControllerReportParams {
  const DraftController* controller;
  double* stats;  // [S, 7] see DraftPolicy::WriteStats
};
CallStatus ControllerReport(const ControllerReportParams& p);

// A step for the regression detector alone; see RegressionDetector::Step.
struct ControllerGainParams {
  DraftController* controller;
  int32_t num_requests;  // >= 0, and > 0 where num_tokens is
  int32_t num_tokens;    // >= 0
  int32_t num_drafts;    // >= 0
  double seconds;        // > 0 where num_tokens is
  double asking_s;
  double slowdown_ratio;
};
CallStatus ControllerObserveGain(const ControllerGainParams& p);

// What the regression detector says of steps of so many requests.
struct ControllerGainFacts {
  double least_gain;
  double gain;              // of the class of the latest step
  int32_t is_off;           // 0 or 1
  int32_t is_worth_asking;  // likewise
};
struct ControllerGainFactsParams {
  const DraftController* controller;
  int32_t num_requests;        // >= 0
  ControllerGainFacts* facts;  // [1]
};
CallStatus ControllerTellGain(const ControllerGainFactsParams& p);

// A step, and what is to be known of it: each call writes its own part, and the speed. See StepCost.
struct ControllerStepCostParams {
  DraftController* controller;  // that has taken costs
  int32_t num_rows;
  int32_t num_requests;
  int64_t num_kv_tokens;         // in the contexts of all of them
  double ms;                     // `observe`: what the step took, finite
  ControllerTimesParams* times;  // [1] `times` writes it
  double* outcome;               // [2] ms that `expected` tells, and the speed
};
CallStatus ControllerTimes(const ControllerStepCostParams& p);
CallStatus ControllerExpectedTime(const ControllerStepCostParams& p);
CallStatus ControllerObserveTime(const ControllerStepCostParams& p);

}  // namespace fdsd
