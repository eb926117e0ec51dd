#pragma once
// How long something around a step usually takes that does not depend on what is drafted in it.
#include <array>
#include <cstdint>

#include "latest_values.h"
#include "load_class.h"

namespace fdsd {

// The lower quartile of the latest seconds, by number of requests (>= 0) in classes of a factor of two: those in which
// something else ran say nothing, and beside busy neighbours these are more than half.
class QuantileEstimator {
 public:
  // It took so long around a step of so many requests.
  void Observe(int32_t num_requests, double seconds);

  // What is to be expected; of another class where this one has not been seen, 0 where none has.
  double Seconds(int32_t num_requests) const;

 private:
  static constexpr size_t kNumKept = 15;
  static constexpr int64_t kTimesPerQuartile = 5;

  struct Class {
    LatestValues<double, kNumKept> kept;
    double quartile = 0.0;
  };

  std::array<Class, kNumLoadClasses> classes_;
  double latest_ = 0.0;  // of the quartiles
  int64_t num_observed_ = 0;
};

}  // namespace fdsd
