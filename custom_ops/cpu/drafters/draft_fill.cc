#include "draft_fill.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace fdsd {
namespace {

// The chains are chosen by a price, which follows from the chains.
constexpr int32_t kNumRounds = 2;
// What a draft costs is at first what it does with this many in the step, or one for each row.
constexpr int32_t kFewDrafts = 4;

double Survival(std::span<const double> accept_probs, int32_t i) { return accept_probs[static_cast<size_t>(i)]; }

bool IsFalling(std::span<const double> accept_probs, const DraftChain& chain) {
  const auto begin = accept_probs.begin() + chain.begin;
  return std::is_sorted(begin, begin + chain.count, std::greater<>());
}

}  // namespace

// Of each row the chain that has most above a least acceptance probability, which is what a draft costs. Returns
// whether these are others than before.
bool DraftFill::ChooseChains(std::span<const DraftChain> chains, std::span<const double> accept_probs, double least) {
  std::swap(chosen_, last_chosen_);
  chosen_.clear();
  int32_t row = -1;
  double best = 0.0;
  for (size_t c = 0; c < chains.size(); ++c) {
    const DraftChain& chain = chains[c];
    double gain = 0.0;
    for (int32_t i = chain.begin; i < chain.begin + chain.count; ++i)
      if (Survival(accept_probs, i) > least) gain += Survival(accept_probs, i) - least;
    if (chain.row != row) {
      chosen_.push_back(static_cast<int32_t>(c));
    } else if (gain > best) {
      chosen_.back() = static_cast<int32_t>(c);
    } else {
      continue;
    }
    row = chain.row;
    best = gain;
  }
  return chosen_ != last_chosen_;
}

// The chosen chains' drafts by acceptance probability in steps of 1 / kNumKeys, stably: a path's drafts stay in order.
void DraftFill::Sort(std::span<const DraftChain> chains, std::span<const double> accept_probs, int32_t max_drafts,
                     double calibration) {
  const auto for_each = [&](auto&& body) {
    for (const int32_t c : chosen_) {
      const DraftChain& chain = chains[static_cast<size_t>(c)];
      for (int32_t i = chain.begin; i < chain.begin + chain.count; ++i) body(c, i);
    }
  };
  sorted_.clear();
  sums_.clear();
  num_certain_ = 0;
  for (const int32_t c : chosen_) num_certain_ += chains[static_cast<size_t>(c)].num_certain;
  if (chosen_.size() == 1 && IsFalling(accept_probs, chains[static_cast<size_t>(chosen_[0])])) {
    for_each([&](int32_t c, int32_t i) {
      sorted_.push_back({c, i});
      sums_.push_back(Survival(accept_probs, i));
    });
  } else {
    const auto key = [&](int32_t i) {
      return static_cast<size_t>(kNumKeys - 1 - static_cast<int32_t>(Survival(accept_probs, i) * (kNumKeys - 1)));
    };
    begins_.assign(kNumKeys + 1, 0);
    for_each([&](int32_t, int32_t i) { ++begins_[key(i) + 1]; });
    for (size_t k = 0; k < kNumKeys; ++k) begins_[k + 1] += begins_[k];
    const auto total = static_cast<size_t>(begins_[kNumKeys]);
    sorted_.resize(total);
    sums_.resize(total);
    for_each([&](int32_t c, int32_t i) {
      const auto to = static_cast<size_t>(begins_[key(i)]++);
      sorted_[to] = {c, i};
      sums_[to] = Survival(accept_probs, i);
    });
  }
  const size_t kept = std::min(sorted_.size(), static_cast<size_t>(max_drafts));
  sorted_.resize(kept);
  sums_.resize(kept);
  num_certain_ = std::min(num_certain_, max_drafts);
  double sum = 0.0;
  for (size_t i = 0; i < kept; ++i)
    sums_[i] = sum += static_cast<int32_t>(i) < num_certain_ ? 1.0 : calibration * sums_[i];
}

DraftFill::Outcome DraftFill::Choose(std::span<const DraftChain> chains, std::span<const double> accept_probs,
                                     int32_t num_outputs, const DraftTimes& times, Demand demand) {
  counts_.assign(chains.size(), 0);
  wanted_.assign(accept_probs.size(), 0);
  const int32_t most = std::min(times.most(), static_cast<int32_t>(accept_probs.size()));
  if (most == 0) return {static_cast<double>(num_outputs), times[0]};
  int32_t num_rows = 0;
  for (size_t c = 0; c < chains.size(); ++c) num_rows += c == 0 || chains[c].row != chains[c - 1].row ? 1 : 0;
  int32_t usual = std::min(most, std::max(kFewDrafts, num_rows)), num_drafts = 0;
  const double plain_rate = num_outputs / times[0];
  double rate = plain_rate, certain_rate = plain_rate;
  int32_t num_certain = 0;
  chosen_.clear();
  const bool has_choice = static_cast<size_t>(num_rows) < chains.size();
  if (!has_choice) {
    chosen_.resize(chains.size());
    std::iota(chosen_.begin(), chosen_.end(), 0);
  }
  for (int32_t round = 0; round < (has_choice ? kNumRounds : 1); ++round) {
    if (has_choice &&
        !ChooseChains(chains, accept_probs, rate * (times[usual] - times[0]) / usual / demand.calibration))
      break;
    Sort(chains, accept_probs, most, demand.calibration);
    rate = certain_rate = plain_rate;
    num_drafts = num_certain = 0;
    for (int32_t d = 1; d <= static_cast<int32_t>(sums_.size()); ++d) {
      const double found = (num_outputs + sums_[static_cast<size_t>(d - 1)]) / times[d];
      if (found > rate) {
        rate = found;
        num_drafts = d;
      }
      if (d == num_certain_) {
        certain_rate = rate;
        num_certain = num_drafts;
      }
    }
    if (num_drafts > 0) usual = num_drafts;
  }
  if (rate < demand.least_gain * certain_rate) num_drafts = num_certain;
  for (int32_t d = 0; d < num_drafts; ++d) {
    const Draft& draft = sorted_[static_cast<size_t>(d)];
    ++counts_[static_cast<size_t>(draft.chain)];
    wanted_[static_cast<size_t>(draft.index)] = 1;
  }
  const double sum = num_drafts == 0 ? 0.0 : sums_[static_cast<size_t>(num_drafts - 1)];
  return {num_outputs + sum, times[num_drafts]};
}

}  // namespace fdsd
