#include "draft_fill.h"

#include <algorithm>

namespace fdsd {
namespace {

// A draft must pay for its time and this much more.
constexpr double kPrice = 1.05;
// The chains are chosen by a price, which follows from the chains.
constexpr int32_t kNumRounds = 2;

double Survival(const std::vector<double>& survivals, int32_t i) { return survivals[static_cast<size_t>(i)]; }

}  // namespace

// Of each row the chain that brings most above a price per draft.
void DraftFill::ChooseChains(const std::vector<DraftChain>& chains, const std::vector<double>& survivals,
                             double row_price) {
  chosen_.clear();
  int32_t row = -1;
  double best = 0.0;
  for (size_t c = 0; c < chains.size(); ++c) {
    const DraftChain& chain = chains[c];
    double gain = 0.0;
    for (int32_t i = chain.begin; i < chain.begin + chain.count && Survival(survivals, i) > row_price; ++i)
      gain += Survival(survivals, i) - row_price;
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
}

// By survival in steps of 1 / kNumKeys, stably: a chain's drafts stay in order.
void DraftFill::Sort(const std::vector<DraftChain>& chains, const std::vector<double>& survivals, int32_t max_drafts) {
  const auto key = [&](int32_t i) {
    return static_cast<size_t>(kNumKeys - 1 - static_cast<int32_t>(Survival(survivals, i) * (kNumKeys - 1)));
  };
  begins_.assign(kNumKeys + 1, 0);
  const auto for_each = [&](auto&& body) {
    for (const int32_t c : chosen_) {
      const DraftChain& chain = chains[static_cast<size_t>(c)];
      for (int32_t i = chain.begin; i < chain.begin + chain.count; ++i) body(c, i);
    }
  };
  for_each([&](int32_t, int32_t i) { ++begins_[key(i) + 1]; });
  for (size_t k = 0; k < kNumKeys; ++k) begins_[k + 1] += begins_[k];
  const auto total = static_cast<size_t>(begins_[kNumKeys]);
  sorted_.resize(total);
  sums_.resize(total);
  for_each([&](int32_t c, int32_t i) {
    const auto to = static_cast<size_t>(begins_[key(i)]++);
    sorted_[to] = c;
    sums_[to] = Survival(survivals, i);
  });
  const size_t kept = std::min(total, static_cast<size_t>(max_drafts));
  sorted_.resize(kept);
  sums_.resize(kept);
  for (size_t d = 1; d < kept; ++d) sums_[d] += sums_[d - 1];
}

DraftFill::Outcome DraftFill::Choose(const std::vector<DraftChain>& chains, const std::vector<double>& survivals,
                                     int32_t num_outputs, const DraftTimes& times) {
  counts_.assign(chains.size(), 0);
  double rate = num_outputs / times[0];
  const int32_t most = std::min(times.most(), static_cast<int32_t>(survivals.size()));
  if (most == 0) return {static_cast<double>(num_outputs), times[0]};
  // Chains are chosen by the mean price of as many drafts as there are rows, or a few for a row alone.
  constexpr int32_t kFewDrafts = 4;
  ChooseChains(chains, survivals, 0.0);
  for (int32_t round = 0; round < kNumRounds; ++round) {
    const int32_t usual = std::min(most, std::max(kFewDrafts, static_cast<int32_t>(chosen_.size())));
    ChooseChains(chains, survivals, kPrice * rate * (times[usual] - times[0]) / usual);
    Sort(chains, survivals, most);
    for (size_t d = 0; d < sums_.size(); ++d)
      rate = std::max(rate, (num_outputs + sums_[d]) / times[static_cast<int32_t>(d) + 1]);
  }
  size_t num_drafts = 0;
  double best = 0.0;
  for (size_t d = 0; d < sums_.size(); ++d) {
    const double gain = sums_[d] - kPrice * rate * (times[static_cast<int32_t>(d) + 1] - times[0]);
    if (gain > best) {
      best = gain;
      num_drafts = d + 1;
    }
  }
  for (size_t d = 0; d < num_drafts; ++d) ++counts_[static_cast<size_t>(sorted_[d])];
  return {num_outputs + (num_drafts == 0 ? 0.0 : sums_[num_drafts - 1]), times[static_cast<int32_t>(num_drafts)]};
}

}  // namespace fdsd
