// What DraftPolicy learns: offers are remembered, and compared with the text once that is committed.
#include <algorithm>

#include "draft_policy.h"
#include "prefetch.h"

namespace fdsd {
namespace {

// Drafts of a step that are kept to be scored: with many rows those of some rows, which change from step to step.
constexpr int32_t kMaxKept = 64, kMaxKeptOfMany = 16;
// Offers of a source in a row that wait to be scored: later ones overlap with them.
constexpr int32_t kMaxOffers = 4;
// So much do one draft of the request and of all requests count in the rates.
constexpr double kRateStep = 0.1, kLastRateStep = 0.02;
// A draft far ahead in an offer says little of how a request is going.
constexpr int32_t kRatePositions = 3;

// Of an offer, what is learned of so many guesses is brought into the caches before the first one is scored.
constexpr int32_t kGuessesAhead = 2;

enum Stat { kNumScored, kProbability, kNumRight, kSquaredError, kNumWanted, kAcceptance, kNumAccepted };

}  // namespace

// Compare one offer with the text. Returns whether more of it may be scored later.
bool DraftPolicy::ScoreOffer(const int32_t* text, int32_t num_tokens, double* rates, OpenOffer* offer) {
  const auto s = static_cast<size_t>(offer->source);
  double* stats = stats_[s].values;
  const auto count = static_cast<int32_t>(offer->guesses.size());
  for (; offer->begin + offer->num_scored < num_tokens;) {
    const int32_t first = offer->last_right + 1, depth = offer->num_scored;
    if (first == count || offer->guesses[static_cast<size_t>(first)].parent != offer->last_right) break;
    const bool is_own = depth >= offer->num_prefix;
    int32_t right = -1;
    for (int32_t i = first, step = 1; step != 0; i += step) {
      const Guess& guess = offer->guesses[static_cast<size_t>(i)];
      const bool is_right = text[offer->begin + depth] == guess.token_id;
      if (is_right) right = i;
      step = guess.next_sibling;
      if (!is_own) continue;  // what follows another text than was thought says nothing
      const double outcome = is_right ? 1.0 : 0.0, error = outcome - guess.prediction.probability;
      ++stats[kNumScored];
      stats[kProbability] += guess.prediction.probability;
      stats[kNumRight] += outcome;
      stats[kSquaredError] += error * error;
      model_.Learn(guess.prediction, is_right);
      if (i == first && depth - offer->num_prefix < kRatePositions) {
        rates[s] += kRateStep * (outcome - rates[s]);
        last_rates_[s] += kLastRateStep * (outcome - last_rates_[s]);
      }
    }
    if (right < 0) break;
    offer->num_scored = depth + 1;
    offer->last_right = right;
    if (is_own && offer->guesses[static_cast<size_t>(right)].is_wanted) {
      ++stats[kNumAccepted];
      ++offer->num_accepted;
    }
    if (is_own && depth + 1 == offer->num_wanted) calibration_.Learn(offer->accept_prob, offer->num_accepted);
  }
  const int32_t next = offer->last_right + 1;
  const bool has_next = next < count && offer->guesses[static_cast<size_t>(next)].parent == offer->last_right;
  if (has_next && offer->begin + offer->num_scored >= num_tokens) return true;
  const bool is_prefix_right = offer->num_scored >= offer->num_prefix;
  if (is_prefix_right && offer->num_scored < offer->num_wanted)
    calibration_.Learn(offer->accept_prob, offer->num_accepted);
  return false;
}

void DraftPolicy::ScoreRow(const ControllerRowsParams& x, int32_t r) {
  const auto table_row = static_cast<size_t>(x.table_rows[r]);
  const int32_t* text = x.token_table + x.table_rows[r] * static_cast<int64_t>(x.max_tokens_per_row);
  double* rates = &rates_[table_row * source_ids_.size()];
  std::vector<OpenOffer>& offers = open_[table_row];
  size_t num_kept = 0;
  for (size_t i = 0; i < offers.size(); ++i) {
    if (!ScoreOffer(text, x.num_tokens[r], rates, &offers[i])) continue;
    if (num_kept != i) std::swap(offers[num_kept], offers[i]);
    ++num_kept;
  }
  for (; offers.size() > num_kept; offers.pop_back()) spare_.push_back(std::move(offers.back()));
  waits_[table_row] = num_kept > 0 ? 1 : 0;
}

// What scoring reads first of a row's offers.
void DraftPolicy::PrefetchOffers(const ControllerRowsParams& x, int32_t r) const {
  const int32_t* text = x.token_table + x.table_rows[r] * static_cast<int64_t>(x.max_tokens_per_row);
  for (const OpenOffer& offer : open_[static_cast<size_t>(x.table_rows[r])]) {
    BringIn(offer.guesses.data() + offer.last_right + 1);
    BringIn(text + offer.begin + offer.num_scored);
  }
}

// And then, of a few guesses.
void DraftPolicy::PrefetchLearned(const ControllerRowsParams& x, int32_t r) const {
  for (const OpenOffer& offer : open_[static_cast<size_t>(x.table_rows[r])]) {
    const auto first = std::max(offer.last_right + 1, offer.num_prefix);
    const auto end = std::min(first + kGuessesAhead, static_cast<int32_t>(offer.guesses.size()));
    for (int32_t i = first; i < end; ++i) model_.PrefetchToLearn(offer.guesses[static_cast<size_t>(i)].prediction);
  }
}

// What is read of a row's offers says where the next part of it lies: while one row is scored, the parts of later ones
// come into the caches.
void DraftPolicy::Score(const ControllerRowsParams& x) {
  waiting_.clear();
  for (int32_t r = 0; r < x.num_rows; ++r) {
    const auto table_row = static_cast<size_t>(x.table_rows[r]);
    if (waits_[table_row] == 0) continue;
    waiting_.push_back(r);
    BringIn(&open_[table_row]);
  }
  const size_t count = waiting_.size();
  for (size_t i = 0; i < count + 3; ++i) {
    if (i < count) BringIn(open_[static_cast<size_t>(x.table_rows[waiting_[i]])].data());
    if (i >= 1 && i < count + 1) PrefetchOffers(x, waiting_[i - 1]);
    if (i >= 2 && i < count + 2) PrefetchLearned(x, waiting_[i - 2]);
    if (i >= 3) ScoreRow(x, waiting_[i - 3]);
  }
}

// Remember what was looked at, to be scored.
void DraftPolicy::Keep(const ControllerDecideParams& p) {
  int32_t num_left = has_many_offers_ ? kMaxKeptOfMany : kMaxKept;
  const size_t num_chains = chains_.size();
  size_t next = num_chains == 0 ? 0 : num_decisions_ % num_chains;
  for (size_t i = 0; i < num_chains && num_left > 0; ++i) {
    const size_t c = next;
    next = next + 1 == num_chains ? 0 : next + 1;
    const DraftChain& chain = chains_[c];
    if (chain.source == kPrefixOnly) continue;
    std::vector<OpenOffer>& open = open_[static_cast<size_t>(p.rows.table_rows[chain.row])];
    const auto is_same = [&](const OpenOffer& offer) { return offer.source == chain.source; };
    const int32_t num_wanted = makes_trees_ ? CountWanted(chain) : fill_.counts()[c];
    if (num_wanted == 0 && std::count_if(open.begin(), open.end(), is_same) >= kMaxOffers) continue;
    KeepOffer(p, chain, num_wanted, &open);
    waits_[static_cast<size_t>(p.rows.table_rows[chain.row])] = 1;
    num_left -= chain.count;
  }
  ++num_decisions_;
}

void DraftPolicy::KeepOffer(const ControllerDecideParams& p, const DraftChain& chain, int32_t num_wanted,
                            std::vector<OpenOffer>* open) {
  if (spare_.empty()) spare_.emplace_back();
  open->push_back(std::move(spare_.back()));
  spare_.pop_back();
  OpenOffer& offer = open->back();
  offer.source = chain.source;
  offer.begin = p.rows.num_tokens[chain.row];
  offer.num_prefix = DraftPrefix(p.rows, chain.row).count;
  offer.num_scored = offer.num_wanted = offer.num_accepted = 0;
  offer.last_right = -1;
  offer.accept_prob = 0.0;
  const Guess* first = &guesses_[static_cast<size_t>(chain.begin)];
  offer.guesses.assign(first, first + chain.count);
  if (num_wanted == 0) return;
  double* stats = stats_[static_cast<size_t>(chain.source)].values;
  depths_.resize(static_cast<size_t>(chain.count));
  for (int32_t i = 0; i < (makes_trees_ ? chain.count : num_wanted); ++i) {
    Guess& guess = offer.guesses[static_cast<size_t>(i)];
    guess.is_wanted |= !makes_trees_;
    depths_[static_cast<size_t>(i)] = guess.parent < 0 ? 1 : depths_[static_cast<size_t>(guess.parent)] + 1;
    if (!guess.is_wanted) continue;
    offer.num_wanted = std::max(offer.num_wanted, depths_[static_cast<size_t>(i)]);
    if (i < offer.num_prefix) continue;
    ++stats[kNumWanted];
    offer.accept_prob += accept_probs_[static_cast<size_t>(chain.begin + i)];
  }
  stats[kAcceptance] += offer.accept_prob;
}

void DraftPolicy::WriteStats(double* stats) const {
  for (size_t s = 0; s < stats_.size(); ++s)
    std::copy_n(stats_[s].values, kNumStats, stats + s * static_cast<size_t>(kNumStats));
}

}  // namespace fdsd
