#include "regression_detector.h"

namespace fdsd {

void RegressionDetector::Observe(const Step& step) {
  latest_ = LoadClass(step.num_requests);
  classes_[latest_].Observe(step);
}

void RegressionDetector::Rest(int32_t num_requests, int32_t num_steps) {
  classes_[LoadClass(num_requests)].PassTime(num_steps);
}

}  // namespace fdsd
