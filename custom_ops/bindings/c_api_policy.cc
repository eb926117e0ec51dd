// C functions of the draft policy, for ctypes. Nothing is thrown across them.
#include "c_api.h"
#include "draft_policy.h"
#include "draft_wants.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the draft policy, got none";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_policy_create(const fdsd::PolicyCreateParams* p) {
  if (fdsd::Error error = fdsd::DraftPolicy::CheckCreate(*p)) return error;
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->policy = new fdsd::DraftPolicy(*p);
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_policy_destroy(fdsd::DraftPolicy* policy) { delete policy; }

FDSD_EXPORT fdsd::Error fdsd_policy_begin(const fdsd::PolicyTableRowsParams* p) {
  return p->policy->Begin(p->table_rows, p->count);
}

FDSD_EXPORT fdsd::Error fdsd_policy_forget(const fdsd::PolicyTableRowsParams* p) {
  return p->policy->Forget(p->table_rows, p->count);
}

FDSD_EXPORT fdsd::Error fdsd_policy_ask(const fdsd::PolicyDecideParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->policy->Ask(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_policy_offer(const fdsd::PolicyDecideParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->policy->Offer(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_policy_choose(const fdsd::PolicyDecideParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->policy->Choose(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_policy_wants(const fdsd::PolicyWantsParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return fdsd::DraftWants(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_policy_decide(const fdsd::PolicyDecideParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->policy->Decide(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_policy_stats(const fdsd::PolicyStatsParams* p) {
  p->policy->WriteStats(p->stats);
  return nullptr;
}
