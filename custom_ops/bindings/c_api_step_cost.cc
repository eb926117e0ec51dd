// C functions of the step cost, for ctypes. Nothing is thrown across them.
#include <cmath>

#include "c_api.h"
#include "step_cost.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the step cost, got none";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_step_cost_create(const fdsd::StepCostCreateParams* p) {
  if (fdsd::Error error = fdsd::StepCost::CheckCreate(*p)) return error;
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->cost = new fdsd::StepCost(*p);
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_step_cost_destroy(fdsd::StepCost* cost) { delete cost; }

FDSD_EXPORT fdsd::Error fdsd_step_cost_times(const fdsd::StepCostParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->times = p->cost->Times(p->num_rows, p->num_requests, p->num_kv_tokens);
    p->outcome[1] = p->cost->speed();
    return nullptr;
  });
}

FDSD_EXPORT fdsd::Error fdsd_step_cost_expected(const fdsd::StepCostParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    p->outcome[0] = p->cost->Expected(p->num_rows, p->num_requests, p->num_kv_tokens);
    p->outcome[1] = p->cost->speed();
    return nullptr;
  });
}

FDSD_EXPORT fdsd::Error fdsd_step_cost_observe(const fdsd::StepCostParams* p) {
  if (!std::isfinite(p->ms)) return "ms: expected a finite number, got another";
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    p->cost->Observe(p->num_rows, p->num_requests, p->num_kv_tokens, p->ms);
    p->outcome[1] = p->cost->speed();
    return nullptr;
  });
}
