// C functions of the detector, for ctypes. Nothing is thrown across them.
#include "c_api.h"
#include "fdsd/regression.h"
#include "regression_detector.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the detector, got none";
constexpr fdsd::Error kNegativeRequests = "num_requests: expected >= 0, got a negative number";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_regression_create(const fdsd::RegressionCreateParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->detector = new fdsd::RegressionDetector;
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_regression_destroy(fdsd::RegressionDetector* detector) { delete detector; }

FDSD_EXPORT fdsd::Error fdsd_regression_observe(const fdsd::RegressionObserveParams* p) {
  if (p->num_requests < 0) return kNegativeRequests;
  if (p->num_tokens < 0) return "num_tokens: expected >= 0, got a negative number";
  if (p->num_drafts < 0) return "num_drafts: expected >= 0, got a negative number";
  if (p->num_tokens > 0 && p->num_requests == 0) return "num_requests: expected > 0 in a step with tokens, got 0";
  if (p->num_tokens > 0 && !(p->seconds > 0.0)) return "seconds: expected > 0 in a step with tokens, got none";
  p->detector->Observe({p->num_requests, p->num_tokens, p->num_drafts, p->seconds, p->asking_s, p->slowdown_ratio});
  return nullptr;
}

FDSD_EXPORT fdsd::Error fdsd_regression_facts(const fdsd::RegressionFactsParams* p) {
  if (p->num_requests < 0) return kNegativeRequests;
  *p->facts = {.least_gain = p->detector->LeastGain(p->num_requests),
               .gain = p->detector->gain(),
               .is_off = p->detector->IsOff(p->num_requests),
               .is_worth_asking = p->detector->IsWorthAsking(p->num_requests)};
  return nullptr;
}
