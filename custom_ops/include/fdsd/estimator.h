#pragma once
// What the calls look like that learn from the steps of a server what the next ones take, and whether drafts pay.
#include "fdsd/policy.h"
#include "fdsd/status.h"

namespace fdsd {

class RegressionDetector;
class StepCost;
class OnlineEstimator;

struct EstimatorCreateParams {
  RegressionDetector* detector;  // told of every step; outlives the estimator
  uint64_t covered_sources;      // bit s: what source s drafts others nearly always do as well; see OnlineEstimator
  OnlineEstimator** estimator;   // [1], to be destroyed with fdsd_estimator_destroy
};

struct EstimatorTakeCostsParams {
  OnlineEstimator* estimator;
  StepCost* cost;  // told of every step that it can be compared with; outlives the estimator
};

// A step that is over, and the one ahead, of the rows that drafts are chosen for: `next` says which.
struct EstimatorObserveParams {
  OnlineEstimator* estimator;
  struct Step {
    int32_t num_requests;       // that the model ran
    int32_t num_rows;           // tokens, drafts and parts of prompts included
    int32_t num_prompt_tokens;  // of them in parts of prompts
    int32_t num_forbidden;      // of the requests those that allow no drafts
    int32_t num_skipped_steps;  // steps up to this one in which nobody was asked: it is the only one known of them
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
  PolicyDecideParams* next;         // its `times`, what follows and `skipped_sources` become those of the step ahead
  double* outcome;                  // [9] see OnlineEstimator::StepForecast
};

}  // namespace fdsd
