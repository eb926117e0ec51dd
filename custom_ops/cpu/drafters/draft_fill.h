#pragma once
// How many rows of drafts a step is worth. Knows chains of drafts by how probable each is, no requests and no tokens.
#include <cstdint>
#include <span>
#include <vector>

#include "draft_times.h"

namespace fdsd {

// A chain of drafts that may go into the step: acceptance probabilities[begin, begin + count), falling, the probability
// of each to be accepted.
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

 private:
  static constexpr int32_t kNumKeys = 1024;

  bool ChooseChains(std::span<const DraftChain> chains, std::span<const double> accept_probs, double least);
  void Sort(std::span<const DraftChain> chains, std::span<const double> accept_probs, int32_t max_drafts,
            double calibration);

  std::vector<int32_t> chosen_;  // chains, one of each row
  std::vector<int32_t> last_chosen_;
  std::vector<int32_t> sorted_;  // the chain of each draft, by falling acceptance probability
  std::vector<double> sums_;     // of the first calibrated acceptance probabilities of sorted_
  int32_t num_certain_ = 0;      // the first of sorted_
  std::vector<int32_t> counts_;
  std::vector<int32_t> begins_;
};

}  // namespace fdsd
