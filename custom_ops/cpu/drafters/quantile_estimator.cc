#include "quantile_estimator.h"

namespace fdsd {

void QuantileEstimator::Observe(int32_t num_requests, double seconds) {
  Class& found = classes_[LoadClass(num_requests)];
  const bool is_first = found.kept.empty();
  found.kept.Add(seconds);
  ++num_observed_;
  if (is_first || num_observed_ % kTimesPerQuartile == 0) {
    latest_ = found.quartile = found.kept.Ranked(found.kept.size() / 4);
  }
}

double QuantileEstimator::Seconds(int32_t num_requests) const {
  const Class& found = classes_[LoadClass(num_requests)];
  return found.kept.empty() ? latest_ : found.quartile;
}

}  // namespace fdsd
