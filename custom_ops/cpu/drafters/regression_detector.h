#pragma once
// Whether drafting pays: steps with drafts against plain ones that are put between them. Knows no drafts.
#include <array>
#include <cstdint>

#include "batch_size_bucket.h"
#include "load_class.h"

namespace fdsd {

// Told of every step, asked before the next one. By number of requests (>= 0), in classes of a factor of two: what pays
// for one request may not pay for thirty.
//
// A machine's speed changes from one second to the next, and plain steps are rare where drafts pay: so before more is
// demanded of drafts that seem to lose, they are compared with plain steps that take turns with them.
class RegressionDetector {
 public:
  using Step = BatchSizeBucket::Step;

  // A step is over.
  void Observe(const Step& step);

  // So many plain steps went by that it is not told of.
  void Rest(int32_t num_requests, int32_t num_steps);

  // Whether asking in steps of so many requests has brought more lately than it took.
  bool IsWorthAsking(int32_t num_requests) const { return Of(num_requests).worth() > 0.0; }

  // What drafts must be expected to bring in the next step of so many requests: 1 or more. Infinite where it is to be
  // plain, as one is due, or because drafts lose whatever is expected of them.
  double LeastGain(int32_t num_requests) const { return Of(num_requests).LeastGain(); }

  // Whether steps of so many requests are plain because drafts did not pay.
  bool IsOff(int32_t num_requests) const { return Of(num_requests).is_off(); }

  // Tokens per second over those of plain steps, in the class of the latest step; 0 = not known yet.
  double gain() const { return classes_[latest_].gain(); }

 private:
  const BatchSizeBucket& Of(int32_t num_requests) const { return classes_[LoadClass(num_requests)]; }

  std::array<BatchSizeBucket, kNumLoadClasses> classes_;
  size_t latest_ = 0;
};

}  // namespace fdsd
