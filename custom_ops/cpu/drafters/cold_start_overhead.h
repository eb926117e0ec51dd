#pragma once
// What the first step with drafts behind plain ones takes longer than expected: its code is not in the caches.
#include <array>
#include <cstdint>

#include "latest_values.h"
#include "load_class.h"

namespace fdsd {

// A rare kind of step is slower than the same step again and again, as profiles have it. Only steps beside one another
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
  // Steps that count, and those that must have been seen. Of them the lower quartile is told: beside busy neighbours
  // more than half of all steps are interrupted.
  static constexpr size_t kNumKept = 16, kFewest = 3;
  // Plain steps after which one is forgotten.
  static constexpr int32_t kStepsPerAge = 4;

  class Class {
   public:
    // A step without drafts. What nobody has seen for long is forgotten, so that it is tried again.
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
