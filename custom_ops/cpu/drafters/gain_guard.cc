#include "gain_guard.h"

namespace fdsd {

void GainGuard::Observe(const Step& step) {
  latest_ = LoadClass(step.num_requests);
  classes_[latest_].Observe(step);
}

void GainGuard::Rest(int32_t num_requests, int32_t num_steps) { classes_[LoadClass(num_requests)].PassTime(num_steps); }

}  // namespace fdsd
