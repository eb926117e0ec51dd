#pragma once
// How long the phases of a decision take, for whoever measures. Knows no policy; nothing is decided by it.
#include <chrono>
#include <cstdint>

#include "fdsd/policy.h"

namespace fdsd {

// Adds up seconds; without a place to put them it looks at no clock.
class PhaseClock {
 public:
  explicit PhaseClock(double* seconds) : seconds_(seconds) {
    if (seconds_ != nullptr) last_ = std::chrono::steady_clock::now();
  }

  // What was done since the clock was made, or since the last lap, was this.
  void Lap(PolicyPhase phase) {
    if (seconds_ == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<int32_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace fdsd
