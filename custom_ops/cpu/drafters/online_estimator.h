#pragma once
// What steps that are over teach: what the next one takes with all around it, and whether drafts pay. Knows no drafts
// and no clock.
#include <vector>

#include "fdsd/controller.h"
#include "regression_detector.h"
#include "statistics.h"
#include "step_cost.h"

namespace fdsd {

//   step = the model's part (StepCost) + the engine's part before it + choosing drafts
//
// A step in which drafts are chosen takes all three. A step with drafts has another engine's part. The first one with
// drafts after a plain one takes longer than others (ColdStartOverhead).
class OnlineEstimator {
 public:
  static constexpr int32_t kNumOutcomes = 9;

  struct StepForecast {
    double least_gain;     // see RegressionDetector
    bool is_off;           // likewise
    bool is_worth_asking;  // likewise
    double gain;           // likewise
    double speed;          // of the machine against when it was measured; 1 = as then
    double predicted_s;    // of all steps that were predicted, their sum
    double measured_s;     // of the same steps
    bool
        is_decode_only;  // nothing was in the step that is over but rows that drafts are chosen for, and forbidden ones
    bool is_decided;     // drafts were chosen
  };

  // `covered_sources` are skipped where asking takes more than 0.03 of a step, until it takes less than 0.012:
  // what they add is less than what they take there.
  OnlineEstimator(RegressionDetector* detector, uint64_t covered_sources)
      : detector_(*detector), covered_sources_(covered_sources) {}

  // From now on the model's part is what was measured; before, a draft takes a tenth of a step of one row.
  void TakeCosts(StepCost* cost) { cost_ = cost; }

  // A step is over. Returns what is known of the next one, and writes that to p.next; is_decided is left to others.
  StepForecast Observe(const ControllerStepParams& p);

 private:
  // The step that is over, as it counts.
  struct Step {
    int64_t num_kv_tokens;  // in the contexts of the rows, after it
    int32_t num_drafts;
    bool is_decode_only;
  };
  void LearnTimes(const ControllerStepParams& p, const Step& step);
  void TellDetector(const ControllerStepParams& p, const Step& step);
  void WriteTimes(const ControllerStepParams& p, int64_t num_kv_tokens);
  double HostSeconds(int32_t num_requests, bool has_drafts) const;
  void WriteUnmeasured(int32_t num_rows, ControllerTimesParams* times);

  RegressionDetector& detector_;
  const uint64_t covered_sources_;
  bool skips_covered_ = false;
  bool has_forecast_ = false;  // by what was measured
  StepCost* cost_ = nullptr;
  QuantileEstimator host_, drafted_host_, drafting_;
  ColdStartOverhead cold_start_;
  std::vector<double> unmeasured_;
  int64_t num_kv_tokens_ = 0;  // after the step before
  double predicted_s_ = 0.0, measured_s_ = 0.0;
  // As foreseen: how many ms of the machine of now one of those measured takes, and what is around the model's part.
  double speed_ = 1.0;
  double around_s_[2] = {0.0, 0.0};  // of a step without drafts, and with some
};

}  // namespace fdsd
