// What DraftPolicy learns: offers are remembered, and compared with the text once that is committed.
#include <algorithm>

#include "draft_policy.h"

namespace fdsd {
namespace {

// Drafts of a step that are kept to be scored: with many rows those of some rows, which change from step to step.
constexpr int32_t kMaxKept = 64, kMaxKeptOfMany = 16;
// Offers of a source in a row that wait to be scored: later ones overlap with them.
constexpr int32_t kMaxOffers = 4;
// So much do one draft of the request and of all requests count in the rates.
constexpr double kRateStep = 0.1, kLastRateStep = 0.02;
// A draft far behind says little of how a request is going.
constexpr int32_t kRatePositions = 3;

enum Stat { kNumScored, kProbability, kNumRight, kSquaredError, kNumWanted, kSurvival, kNumAccepted };

}  // namespace

// Compare one offer with the text. Returns whether more of it may be scored later.
bool DraftPolicy::ScoreOffer(const int32_t* text, int32_t num_tokens, Row* row, OpenOffer* offer) {
  const auto s = static_cast<size_t>(offer->source);
  double* stats = stats_[s].values;
  const auto count = static_cast<int32_t>(offer->guesses.size());
  for (int32_t i = offer->num_scored; i < count && offer->begin + i < num_tokens; ++i) {
    const Guess& guess = offer->guesses[static_cast<size_t>(i)];
    const bool is_right = text[offer->begin + i] == guess.token_id;
    if (i < offer->num_prefix) {  // what follows another text than was thought says nothing
      if (!is_right) return false;
      offer->num_scored = i + 1;
      continue;
    }
    const double outcome = is_right ? 1.0 : 0.0, error = outcome - guess.prediction.probability;
    ++stats[kNumScored];
    stats[kProbability] += guess.prediction.probability;
    stats[kNumRight] += outcome;
    stats[kSquaredError] += error * error;
    model_.Learn(guess.prediction, is_right);
    if (i - offer->num_prefix < kRatePositions) {
      row->rates[s] += kRateStep * (outcome - row->rates[s]);
      last_rates_[s] += kLastRateStep * (outcome - last_rates_[s]);
    }
    if (!is_right) {
      if (i < offer->num_wanted) belief_.Learn(offer->survival, i - offer->num_prefix);
      return false;
    }
    offer->num_scored = i + 1;
    if (i < offer->num_wanted) ++stats[kNumAccepted];
    if (i + 1 == offer->num_wanted) belief_.Learn(offer->survival, offer->num_wanted - offer->num_prefix);
  }
  return offer->num_scored < count;
}

void DraftPolicy::Score(const PolicyRowsParams& x) {
  for (int32_t r = 0; r < x.num_rows; ++r) {
    const int64_t table_row = x.table_rows[r];
    Row& row = rows_[static_cast<size_t>(table_row)];
    std::vector<OpenOffer>& offers = row.offers;
    size_t num_kept = 0;
    for (size_t i = 0; i < offers.size(); ++i) {
      if (!ScoreOffer(x.token_table + table_row * x.max_tokens_per_row, x.num_tokens[r], &row, &offers[i])) continue;
      if (num_kept != i) std::swap(offers[num_kept], offers[i]);
      ++num_kept;
    }
    for (; offers.size() > num_kept; offers.pop_back()) spare_.push_back(std::move(offers.back()));
  }
}

// Remember what was looked at, to be scored.
void DraftPolicy::Keep(const PolicyDecideParams& p) {
  int32_t num_left = has_many_offers_ ? kMaxKeptOfMany : kMaxKept;
  const size_t num_chains = chains_.size();
  for (size_t i = 0; i < num_chains && num_left > 0; ++i) {
    const size_t c = (num_decisions_ + i) % num_chains;
    const DraftChain& chain = chains_[c];
    if (chain.source == kPrefixOnly) continue;
    Row& row = rows_[static_cast<size_t>(p.rows.table_rows[chain.row])];
    const auto is_same = [&](const OpenOffer& offer) { return offer.source == chain.source; };
    const int32_t num_wanted = fill_.counts()[c];
    if (num_wanted == 0 && std::count_if(row.offers.begin(), row.offers.end(), is_same) >= kMaxOffers) continue;
    KeepOffer(p, chain, num_wanted, &row);
    num_left -= chain.count;
  }
  ++num_decisions_;
}

void DraftPolicy::KeepOffer(const PolicyDecideParams& p, const DraftChain& chain, int32_t num_wanted, Row* row) {
  double* stats = stats_[static_cast<size_t>(chain.source)].values;
  const int32_t num_prefix = DraftPrefix(p.rows, chain.row).count;
  stats[kNumWanted] += std::max(num_wanted - num_prefix, 0);
  double survival = 0.0;
  for (int32_t i = num_prefix; i < num_wanted; ++i) survival += survivals_[static_cast<size_t>(chain.begin + i)];
  stats[kSurvival] += survival;
  if (spare_.empty()) spare_.emplace_back();
  row->offers.push_back(std::move(spare_.back()));
  spare_.pop_back();
  OpenOffer& offer = row->offers.back();
  offer.source = chain.source;
  offer.begin = p.rows.num_tokens[chain.row];
  offer.num_prefix = num_prefix;
  offer.num_scored = 0;
  offer.num_wanted = num_wanted;
  offer.survival = survival;
  const auto first = guesses_.begin() + chain.begin;
  offer.guesses.assign(first, first + chain.count);
}

void DraftPolicy::WriteStats(double* stats) const {
  for (size_t s = 0; s < stats_.size(); ++s)
    std::copy_n(stats_[s].values, kNumStats, stats + s * static_cast<size_t>(kNumStats));
}

}  // namespace fdsd
