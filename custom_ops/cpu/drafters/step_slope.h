#pragma once
// How much of something each step has decides how much longer than expected it takes: the slope, followed online.
#include <algorithm>

namespace fdsd {

// Least squares of `ratio = level * (1 + slope * amount)`, late steps counting most; level and slope are unknown.
class StepSlope {
 public:
  // A step took `ratio` times as long as expected without its `amount`, >= 0, being counted.
  void Observe(double ratio, double amount) {
    sum_ = kMemory * sum_ + 1.0;
    sum_x_ = kMemory * sum_x_ + amount;
    sum_xx_ = kMemory * sum_xx_ + amount * amount;
    sum_y_ = kMemory * sum_y_ + ratio;
    sum_xy_ = kMemory * sum_xy_ + ratio * amount;
    const double mean_x = sum_x_ / sum_, mean_y = sum_y_ / sum_;
    const double variance = sum_xx_ / sum_ - mean_x * mean_x;
    const double slope = (sum_xy_ / sum_ - mean_x * mean_y) / (variance + kRidge / sum_);
    const double level = mean_y - slope * mean_x;
    value_ = level > 0 ? std::clamp(slope / level, -kLargest, kLargest) : kLargest;
  }

  // The slope, -1 .. 1; 0 before steps have differed in their amounts.
  double value() const { return value_; }

 private:
  // Weight of a step against the one behind it: some 200 steps count.
  static constexpr double kMemory = 0.995;
  // As if steps whose amounts vary this much in all had shown a slope of 0: so a few noisy ones say little.
  static constexpr double kRidge = 4.0;
  static constexpr double kLargest = 1.0;

  double value_ = 0.0;
  double sum_ = 0.0, sum_x_ = 0.0, sum_xx_ = 0.0, sum_y_ = 0.0, sum_xy_ = 0.0;
};

}  // namespace fdsd
