#pragma once
// What is followed of steps: the latest values, their quantiles, a slope. Knows no drafts.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace fdsd {

inline constexpr size_t kNumLoadClasses = 32;

// num_requests: >= 0. 0 is a class of its own, then 1, 2 .. 3, 4 .. 7, and so on.
inline size_t LoadClass(int32_t num_requests) {
  return static_cast<size_t>(std::bit_width(static_cast<uint32_t>(num_requests)));
}

// At most kMost values: where there is no room for another one the oldest is dropped. Allocates nothing.
template <typename T, size_t kMost>
class LatestValues {
 public:
  void Add(T value) {
    if (count_ == kMost) DropOldest();
    values_[(begin_ + count_) % kMost] = value;
    ++count_;
  }

  // There must be one.
  void DropOldest() {
    begin_ = (begin_ + 1) % kMost;
    --count_;
  }

  void Clear() { count_ = 0; }

  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }

  // The i-th, from the oldest on.
  T operator[](size_t i) const { return values_[(begin_ + i) % kMost]; }

  // The i-th, from the least on.
  T Ranked(size_t i) const {
    std::array<T, kMost> sorted{};
    for (size_t k = 0; k < count_; ++k) sorted[k] = (*this)[k];
    std::nth_element(sorted.begin(), sorted.begin() + i, sorted.begin() + count_);
    return sorted[i];
  }

 private:
  std::array<T, kMost> values_{};
  size_t begin_ = 0, count_ = 0;
};

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
  // Weight of a step against the one after it: some 200 steps count.
  static constexpr double kMemory = 0.995;
  // As if steps whose amounts vary this much in all had shown a slope of 0: so a few noisy ones say little.
  static constexpr double kRidge = 4.0;
  static constexpr double kLargest = 1.0;

  double value_ = 0.0;
  double sum_ = 0.0, sum_x_ = 0.0, sum_xx_ = 0.0, sum_y_ = 0.0, sum_xy_ = 0.0;
};

// The lower quartile of the latest seconds, by number of requests (>= 0) in classes of a factor of two. Seconds in
// which something else ran say nothing, and with busy neighbours these are more than half.
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

// A rare kind of step is slower than the same step again and again, as profiles have it. Only neighbouring steps
// are compared, as a machine's speed changes from one second to the next. By number of requests (>= 0) in classes of a
// factor of two.
class ColdStartOverhead {
 public:
  // A step took so long; expected_ms > 0: as the machine was measured.
  void Observe(int32_t num_requests, double ms, double expected_ms, bool has_drafts);

  // The excess, 0 or more, in milliseconds of the machine as it was measured.
  double Ms(int32_t num_requests) const;

 private:
  // Plain steps that one with drafts is compared with: of so few the quickest is what a quarter of them do not exceed.
  static constexpr size_t kNumBefore = 3;
  // What a step may say, as a part of what was expected of it: if all were interrupted, drafts must not end for good.
  static constexpr double kMostShare = 0.5;
  // Steps that count, and those that must have been seen. Of them the lower quartile is told: with busy neighbours
  // more than half of all steps are interrupted.
  static constexpr size_t kNumKept = 16, kFewest = 3;
  // Plain steps after which one is forgotten.
  static constexpr int32_t kStepsPerAge = 4;

  class Class {
   public:
    // A step without drafts. What was not seen for long is forgotten, so that it is tried again.
    void ObservePlain(double ratio);

    // A step with drafts, of which a part of what was expected counts at most.
    void ObserveDrafts(double ms, double expected_ms);

    // The lower quartile of the latest excesses; 0 until enough were seen.
    double ms() const { return ms_; }

   private:
    void Tell();

    LatestValues<double, kNumBefore> plain_;  // since the latest drafts, over what was expected
    LatestValues<double, kNumKept> kept_;
    int32_t num_plain_ = 0;
    double ms_ = 0.0;
  };

  std::array<Class, kNumLoadClasses> classes_;
};

}  // namespace fdsd
