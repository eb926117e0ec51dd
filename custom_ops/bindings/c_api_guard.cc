// C functions of the guard, for ctypes. Nothing is thrown across them.
#include "c_api.h"
#include "fdsd/guard.h"
#include "gain_guard.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the guard, got none";
constexpr fdsd::Error kNegativeRequests = "num_requests: expected >= 0, got a negative number";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_guard_create(const fdsd::GuardCreateParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->guard = new fdsd::GainGuard;
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_guard_destroy(fdsd::GainGuard* guard) { delete guard; }

FDSD_EXPORT fdsd::Error fdsd_guard_observe(const fdsd::GuardObserveParams* p) {
  if (p->num_requests < 0) return kNegativeRequests;
  if (p->num_tokens < 0) return "num_tokens: expected >= 0, got a negative number";
  if (p->num_drafts < 0) return "num_drafts: expected >= 0, got a negative number";
  if (p->num_tokens > 0 && p->num_requests == 0) return "num_requests: expected > 0 in a step with tokens, got 0";
  if (p->num_tokens > 0 && !(p->seconds > 0.0)) return "seconds: expected > 0 in a step with tokens, got none";
  p->guard->Observe({p->num_requests, p->num_tokens, p->num_drafts, p->seconds, p->asking_s, p->stretch});
  return nullptr;
}

FDSD_EXPORT fdsd::Error fdsd_guard_facts(const fdsd::GuardFactsParams* p) {
  if (p->num_requests < 0) return kNegativeRequests;
  *p->facts = {.least_gain = p->guard->LeastGain(p->num_requests),
               .gain = p->guard->gain(),
               .is_off = p->guard->IsOff(p->num_requests),
               .is_worth_asking = p->guard->IsWorthAsking(p->num_requests)};
  return nullptr;
}
