#include "statistics.h"

#include <algorithm>

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

void ColdStartOverhead::Observe(int32_t num_requests, double ms, double expected_ms, bool has_drafts) {
  Class& found = classes_[LoadClass(num_requests)];
  if (has_drafts) {
    found.ObserveDrafts(ms, expected_ms);
  } else {
    found.ObservePlain(ms / expected_ms);
  }
}

double ColdStartOverhead::Ms(int32_t num_requests) const {
  return std::max(0.0, classes_[LoadClass(num_requests)].ms());
}

void ColdStartOverhead::Class::ObservePlain(double ratio) {
  plain_.Add(ratio);
  if (++num_plain_ < kStepsPerAge) return;
  num_plain_ = 0;
  if (kept_.empty()) return;
  kept_.DropOldest();
  Tell();
}

void ColdStartOverhead::Class::ObserveDrafts(double ms, double expected_ms) {
  if (!plain_.empty()) {
    kept_.Add(std::min(ms / plain_.Ranked(0) - expected_ms, kMostShare * expected_ms));
    Tell();
  }
  plain_.Clear();
  num_plain_ = 0;
}

void ColdStartOverhead::Class::Tell() { ms_ = kept_.size() >= kFewest ? kept_.Ranked(kept_.size() / 4) : 0.0; }

}  // namespace fdsd
