#pragma once
// How many rows of drafts a step is worth. Knows chains and trees of drafts by how probable each is, no requests and no
// tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "fdsd/controller.h"

namespace fdsd {

class DraftTimes {
 public:
  // At most `most` drafts. Requires 0 <= num_step_rows < num_times.
  DraftTimes(const ControllerTimesParams& p, int64_t most)
      : curve_(p.curve + p.num_step_rows),
        fixed_(p.fixed),
        per_draft_(p.per_draft),
        any_draft_(p.any_draft),
        most_(static_cast<int32_t>(std::min<int64_t>(most, p.num_times - 1 - p.num_step_rows))) {}

  Error Check() const {
    bool is_rising = true;
    for (int32_t d = 0; d < most_; ++d) is_rising &= curve_[d + 1] >= curve_[d];
    // Of rising numbers the first and the last are the least and the most.
    if (is_rising && per_draft_ >= 0 && any_draft_ >= 0 && (*this)[0] > 0 && std::isfinite((*this)[most_]))
      return nullptr;
    return "times: expected finite rising numbers > 0, got others";
  }

  // Of d drafts, 0 <= d <= most().
  double operator[](int32_t d) const { return curve_[d] + fixed_ + d * per_draft_ + (d > 0 ? any_draft_ : 0.0); }

  // Drafts that the step can have at most.
  int32_t most() const { return most_; }

 private:
  const double* curve_;
  double fixed_;
  double per_draft_;
  double any_draft_;
  int32_t most_;
};

// The guesses with high probabilities are chosen, so fewer of the chosen drafts are right than of all guesses that are
// as high. The difference is small where texts repeat themselves, and a third where they are sampled. The ratio is
// followed; later drafts count most.
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

// A chain of drafts that may go into the step: acceptance probabilities[begin, begin + count), falling, the probability
// of each to be accepted. Or a tree, each draft after the one that it follows: the probabilities fall along each path.
struct DraftChain {
  int32_t row;
  int32_t source;
  int32_t begin;
  int32_t count;
  int32_t num_certain = 0;  // the first ones, whose acceptance probabilities are 1 and no guesses
};

// The d drafts that bring most tokens per time, the tokens that come anyway being `num_outputs`:
//
//   max over d of (num_outputs + sum of the d highest acceptance probabilities) / times[d]
//
// with calibrated acceptance probabilities, and no guesses where that is not enough. Every d is looked at:
// so stairs in `times` are found wherever they are, and many drafts that only pay together as well. Of several chains
// of a row one is taken. Drafts that are certain come first; no more is demanded of them than that they are worth their
// time.
class DraftFill {
 public:
  struct Outcome {
    double num_tokens;  // expected
    double time;
  };

  // What is asked of guesses.
  struct Demand {
    double calibration;  // of every acceptance probability, > 0
    double least_gain;   // tokens per time over those without guesses, >= 1
  };

  // Choose from chains, sorted by row, whose acceptance probabilities these are. Afterwards counts()[i] drafts of chain
  // i are wanted.
  Outcome Choose(std::span<const DraftChain> chains, std::span<const double> accept_probs, int32_t num_outputs,
                 const DraftTimes& times, Demand demand);

  const std::vector<int32_t>& counts() const { return counts_; }

  // Whether a draft is wanted, by where its acceptance probability is.
  bool wants(int32_t i) const { return wanted_[static_cast<size_t>(i)] != 0; }

 private:
  static constexpr int32_t kNumKeys = 1024;

  bool ChooseChains(std::span<const DraftChain> chains, std::span<const double> accept_probs, double least);
  void Sort(std::span<const DraftChain> chains, std::span<const double> accept_probs, int32_t max_drafts,
            double calibration);

  std::vector<int32_t> chosen_;  // chains, one of each row
  std::vector<int32_t> last_chosen_;
  struct Draft {
    int32_t chain, index;
  };
  std::vector<Draft> sorted_;  // by falling acceptance probability
  std::vector<double> sums_;   // of the first calibrated acceptance probabilities of sorted_
  int32_t num_certain_ = 0;    // the first of sorted_
  std::vector<int32_t> counts_;
  std::vector<uint8_t> wanted_;
  std::vector<int32_t> begins_;
};

}  // namespace fdsd
