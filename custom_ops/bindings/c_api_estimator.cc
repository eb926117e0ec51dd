// C functions of what steps teach, for ctypes. Nothing is thrown across them.
#include <algorithm>
#include <cmath>

#include "asked_drafters.h"
#include "c_api.h"
#include "draft_policy.h"
#include "online_estimator.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for what steps teach, got none";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_estimator_create(const fdsd::EstimatorCreateParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->estimator = new fdsd::OnlineEstimator(p->detector, p->covered_sources);
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_estimator_destroy(fdsd::OnlineEstimator* estimator) { delete estimator; }

FDSD_EXPORT fdsd::Error fdsd_estimator_take_costs(const fdsd::EstimatorTakeCostsParams* p) {
  p->estimator->TakeCosts(p->cost);
  return nullptr;
}

FDSD_EXPORT fdsd::Error fdsd_estimator_observe(const fdsd::EstimatorObserveParams* p) {
  if (p->step.num_requests < 0) return "num_requests: expected >= 0, got a negative number";
  if (p->step.num_rows < 0) return "num_rows: expected >= 0, got a negative number";
  if (p->num_prompt_tokens_ahead < 0) return "num_prompt_tokens_ahead: expected >= 0, got a negative number";
  if (p->step.num_forbidden < 0) return "num_forbidden: expected >= 0, got a negative number";
  if (p->step.num_skipped_steps < 0) return "num_skipped_steps: expected >= 0, got a negative number";
  for (const double value : {p->took.seconds, p->took.host_seconds, p->took.asking_s, p->took.lookup_s,
                             p->took.choosing_s, p->took.time, p->took.plain_time})
    if (!std::isfinite(value)) return "seconds: expected finite times, got another";
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    fdsd::OnlineEstimator::StepForecast found = p->estimator->Observe(*p);
    if (p->decides && std::isfinite(found.least_gain) && fdsd::AskedDrafters::AllowsDrafts(p->next->rows)) {
      if (fdsd::Error error = p->next->policy->Decide(*p->next)) return error;
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
    static_assert(std::size(values) == fdsd::OnlineEstimator::kNumOutcomes);
    std::ranges::copy(values, p->outcome);
    return nullptr;
  });
}
