#pragma once
// Decides what a server drafts: what steps take, whether drafts pay, and which of them the next step verifies. Knows no
// drafting rule, no model and no clock.
#include <memory>

#include "draft_policy.h"
#include "fdsd/controller.h"
#include "online_estimator.h"
#include "regression_detector.h"
#include "step_cost.h"

namespace fdsd {

// One per server, told of every step in order:
//
//   a step is over -> OnlineEstimator: times of the next one, RegressionDetector: what drafts must bring
//                  -> DraftPolicy: scores earlier offers, asks the drafters, chooses
//
// Calls must not overlap.
class DraftController {
 public:
  // Checks nothing; see DraftPolicy::CheckCreate.
  explicit DraftController(const ControllerCreateParams& p)
      : policy(p), detector(), estimator(&detector, p.covered_sources) {}
  DraftController(const DraftController&) = delete;
  DraftController& operator=(const DraftController&) = delete;

  // From now on the model's part of a step is what was measured; before, a draft takes a tenth of a step.
  Error TakeCosts(const ControllerCostParams& p);

  // A step is over. `outcome` becomes what is known of the next one, for which drafts are chosen where `decides`.
  Error Step(const ControllerStepParams& p);

  DraftPolicy policy;
  RegressionDetector detector;
  OnlineEstimator estimator;
  std::unique_ptr<StepCost> cost;  // nullptr = nothing was measured
};

}  // namespace fdsd
