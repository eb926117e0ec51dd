#include "draft_controller.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "draft_offers.h"
#include "draft_policy.h"

namespace fdsd {
namespace {

constexpr Error kNegativeRequests = "num_requests: expected >= 0, got a negative number";

Error CheckStep(const ControllerStepParams& p) {
  if (p.step.num_requests < 0) return kNegativeRequests;
  if (p.step.num_rows < 0) return "num_rows: expected >= 0, got a negative number";
  if (p.num_prompt_tokens_ahead < 0) return "num_prompt_tokens_ahead: expected >= 0, got a negative number";
  if (p.step.num_forbidden < 0) return "num_forbidden: expected >= 0, got a negative number";
  if (p.step.num_skipped_steps < 0) return "num_skipped_steps: expected >= 0, got a negative number";
  for (const double value : {p.took.seconds, p.took.host_seconds, p.took.asking_s, p.took.lookup_s, p.took.choosing_s,
                             p.took.time, p.took.plain_time})
    if (!std::isfinite(value)) return "seconds: expected finite times, got another";
  return nullptr;
}

}  // namespace

Error DraftController::TakeCosts(const ControllerCostParams& p) {
  if (Error error = StepCost::CheckCreate(p)) return error;
  CostTables tables(p);
  if (Error error = tables.Check()) return error;
  cost = std::make_unique<StepCost>(std::move(tables));
  estimator.TakeCosts(cost.get());
  return nullptr;
}

Error DraftController::Step(const ControllerStepParams& p) {
  if (Error error = CheckStep(p)) return error;
  OnlineEstimator::StepForecast found = estimator.Observe(p);
  if (p.decides && std::isfinite(found.least_gain) && AskedDrafters::AllowsDrafts(p.next->rows)) {
    if (Error error = policy.Decide(*p.next)) return error;
    found.is_decided = true;
  }
  const double values[] = {found.least_gain,
                           static_cast<double>(found.is_off),
                           static_cast<double>(found.is_worth_asking),
                           found.gain,
                           found.speed,
                           found.predicted_s,
                           found.measured_s,
                           static_cast<double>(found.is_decode_only),
                           static_cast<double>(found.is_decided)};
  static_assert(std::size(values) == OnlineEstimator::kNumOutcomes);
  std::ranges::copy(values, p.outcome);
  return nullptr;
}

CallStatus ControllerCreate(const ControllerCreateParams& p) {
  if (Error error = DraftPolicy::CheckCreate(p)) return error;
  *p.controller = new DraftController(p);
  return nullptr;
}

CallStatus ControllerBegin(const ControllerTableRowsParams& p) {
  return p.controller->policy.Begin(p.table_rows, p.count);
}
CallStatus ControllerForget(const ControllerTableRowsParams& p) {
  return p.controller->policy.Forget(p.table_rows, p.count);
}
CallStatus ControllerTakeCosts(const ControllerCostParams& p) { return p.controller->TakeCosts(p); }
CallStatus ControllerAsk(const ControllerDecideParams& p) { return p.controller->policy.Ask(p); }
CallStatus ControllerOffer(const ControllerDecideParams& p) { return p.controller->policy.Offer(p); }
CallStatus ControllerChoose(const ControllerDecideParams& p) { return p.controller->policy.Choose(p); }
CallStatus ControllerDecide(const ControllerDecideParams& p) { return p.controller->policy.Decide(p); }
CallStatus ControllerWants(const ControllerWantsParams& p) { return DraftWants(p.controller->policy, p); }
CallStatus ControllerStep(const ControllerStepParams& p) { return p.next->controller->Step(p); }
CallStatus ControllerReport(const ControllerReportParams& p) {
  p.controller->policy.WriteStats(p.stats);
  return nullptr;
}

CallStatus ControllerObserveGain(const ControllerGainParams& p) {
  if (p.num_requests < 0) return kNegativeRequests;
  if (p.num_tokens < 0) return "num_tokens: expected >= 0, got a negative number";
  if (p.num_drafts < 0) return "num_drafts: expected >= 0, got a negative number";
  if (p.num_tokens > 0 && p.num_requests == 0) return "num_requests: expected > 0 in a step with tokens, got 0";
  if (p.num_tokens > 0 && !(p.seconds > 0.0)) return "seconds: expected > 0 in a step with tokens, got none";
  p.controller->detector.Observe({p.num_requests, p.num_tokens, p.num_drafts, p.seconds, p.asking_s, p.slowdown_ratio});
  return nullptr;
}

CallStatus ControllerTellGain(const ControllerGainFactsParams& p) {
  if (p.num_requests < 0) return kNegativeRequests;
  const RegressionDetector& detector = p.controller->detector;
  *p.facts = {.least_gain = detector.LeastGain(p.num_requests),
              .gain = detector.gain(),
              .is_off = detector.IsOff(p.num_requests),
              .is_worth_asking = detector.IsWorthAsking(p.num_requests)};
  return nullptr;
}

CallStatus ControllerTimes(const ControllerStepCostParams& p) {
  StepCost& cost = *p.controller->cost;
  *p.times = cost.Times(p.num_rows, p.num_requests, p.num_kv_tokens);
  p.outcome[1] = cost.speed();
  return nullptr;
}

CallStatus ControllerExpectedTime(const ControllerStepCostParams& p) {
  StepCost& cost = *p.controller->cost;
  p.outcome[0] = cost.Expected(p.num_rows, p.num_requests, p.num_kv_tokens);
  p.outcome[1] = cost.speed();
  return nullptr;
}

CallStatus ControllerObserveTime(const ControllerStepCostParams& p) {
  if (!std::isfinite(p.ms)) return "ms: expected a finite number, got another";
  StepCost& cost = *p.controller->cost;
  cost.Observe(p.num_rows, p.num_requests, p.num_kv_tokens, p.ms);
  p.outcome[1] = cost.speed();
  return nullptr;
}

}  // namespace fdsd
