#pragma once
// How many of the drafts that were chosen by their guessed acceptance probabilities are right. Knows no drafts and no
// costs.
#include <algorithm>
#include <cstdint>

namespace fdsd {

// Of guesses the high ones are chosen, so fewer of the chosen drafts are right than of all that were guessed at as
// high: few fewer where texts repeat themselves, a third where they are sampled. The ratio is followed; later drafts
// count most.
class CalibrationRatio {
 public:
  // Drafts were chosen whose acceptance probabilities have this sum, and so many of them were right.
  void Learn(double accept_prob, int32_t num_right) {
    const double kept = kMemory / (kMemory + accept_prob);
    accept_prob_ = kept * accept_prob_ + accept_prob;
    num_right_ = kept * num_right_ + num_right;
  }

  // The factor for an acceptance probability.
  double value() const { return std::clamp(num_right_ / accept_prob_, kLeast, 1.0); }

 private:
  // Expected right drafts that count, and a prior of so many with the usual ratio.
  static constexpr double kMemory = 100.0, kPrior = 20.0, kUsual = 1.0 / 1.05;
  static constexpr double kLeast = 0.5;

  double accept_prob_ = kPrior, num_right_ = kPrior * kUsual;
};

}  // namespace fdsd
