#include "draft_policy.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "draft_offers.h"
#include "draft_prefix.h"

namespace fdsd {
namespace {

// Drafts looked at in a step, so that deciding stays short beside any step, but of every offer the first one.
constexpr int32_t kMaxLookedAt = 512, kLeastLookedAt = 1;
// Where sources could make more offers than this, one of each row is looked at, and so many drafts in all.
constexpr int32_t kManyOffers = 256;
// Behind this, drafts are not worth looking at whatever they cost.
constexpr double kLeastSurvival = 0.02;
// What is predicted so much later is brought into the cache.
constexpr int32_t kRowsAhead = 4, kDraftsAhead = 6;
// So much does the request before count in the rate of a request.
constexpr double kRateInherited = 0.5;

// Of a row's offers the one that knows most of the text. What the caller wrote comes first: a model matches nothing,
// and its drafts were asked for, and paid, as they promise more. Then the longest match, of equals the last one.
int32_t BestOffer(const RowOffers& offers, const AskedDrafters& asked) {
  int32_t best = 0;
  std::pair<bool, int32_t> most{false, -1};
  for (int32_t s = 0; s < offers.num_sources(); ++s) {
    const std::pair<bool, int32_t> knows{!asked.asks(s), offers[s].evidence[0]};
    if (offers[s].count > 0 && knows >= most) {
      best = s;
      most = knows;
    }
  }
  return best;
}

}  // namespace

Error DraftPolicy::CheckCreate(const PolicyCreateParams& p) {
  if (p.num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  if (p.num_sources < 1 || p.num_sources > kMaxSources) return "num_sources: expected 1 to 8, got another number";
  if (p.max_draft_len < 1 || p.max_draft_len > SurvivalModel::kMaxPositions)
    return "max_draft_len: expected 1 to 64, got another";
  return nullptr;
}

DraftPolicy::DraftPolicy(const PolicyCreateParams& p)
    : max_draft_len_(p.max_draft_len),
      source_ids_(p.source_ids, p.source_ids + p.num_sources),
      asked_(p),
      model_(p.num_sources, p.prior_logits),
      rows_(static_cast<size_t>(p.num_table_rows)),
      stats_(static_cast<size_t>(p.num_sources)),
      last_rates_(static_cast<size_t>(p.num_sources), 0.5) {}

Error DraftPolicy::CheckTableRows(const int32_t* table_rows, int32_t count) const {
  for (int32_t i = 0; i < count; ++i)
    if (table_rows[i] < 0 || static_cast<size_t>(table_rows[i]) >= rows_.size())
      return "table_rows: expected 0 to num_table_rows - 1, got one outside";
  return nullptr;
}

Error DraftPolicy::Begin(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    Row& row = rows_[static_cast<size_t>(table_rows[i])];
    row.in_use = true;
    row.request = num_requests_++;
    row.offers.clear();
    for (size_t s = 0; s < source_ids_.size(); ++s)
      row.rates[s] = kRateInherited * last_rates_[s] + (1.0 - kRateInherited) * 0.5;
  }
  return nullptr;
}

Error DraftPolicy::Forget(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) rows_[static_cast<size_t>(table_rows[i])] = Row{};
  return nullptr;
}

Error DraftPolicy::CheckRows(const PolicyDecideParams& p) const {
  const PolicyRowsParams& x = p.rows;
  if (Error error = CheckTableRows(x.table_rows, x.num_rows)) return error;
  for (int32_t r = 0; r < x.num_rows; ++r) {
    if (x.table_rows[r] >= x.num_table_rows) return "table_rows: expected rows of token_table, got one outside";
    if (!rows_[static_cast<size_t>(x.table_rows[r])].in_use)
      return "table_rows: expected table rows that were begun, got another";
    if (x.num_tokens[r] < 0 || x.num_tokens[r] > x.max_tokens_per_row)
      return "num_tokens: expected at most a row of token_table, got another number";
    if (x.max_draft_len[r] < 0) return "max_draft_len: expected >= 0, got a negative length";
  }
  if (p.offers.max_num_rows < x.num_rows) return "offers: expected room for every row, got less";
  return DraftPrefix::Check(x);
}

// Begin a chain of the row with its prefix.
DraftChain DraftPolicy::BeginChain(const DraftPrefix& prefix, int32_t r, int32_t source) {
  const auto begin = static_cast<int32_t>(survivals_.size());
  for (int32_t i = 0; i < prefix.count; ++i) {
    guesses_.push_back({prefix.token_ids[i], {}});
    survivals_.push_back(1.0);
  }
  return {r, source, begin, prefix.count, prefix.count};
}

void DraftPolicy::PredictChain(const RowOffers& offers, const Row& row, DraftChain chain, int32_t max_drafts) {
  const Offered& offered = offers[chain.source];
  const int32_t num_prefix = chain.count;
  const SurvivalModel::Offer offer = SurvivalModel::Read({chain.source, offered.evidence[0], offered.evidence[1],
                                                          offered.evidence[2], row.request, row.rates[chain.source]});
  Agreement agreement(offers, chain.source);
  double survival = 1.0;
  for (int32_t i = 1; i < std::min(max_drafts, kDraftsAhead); ++i)
    model_.Prefetch(row.request, chain.source, offered.token_ids[i]);
  while (chain.count - num_prefix < max_drafts && survival > kLeastSurvival) {
    const int32_t i = chain.count++ - num_prefix;
    const int32_t token_id = offered.token_ids[i];
    if (i + kDraftsAhead < max_drafts) model_.Prefetch(row.request, chain.source, offered.token_ids[i + kDraftsAhead]);
    Guess& guess = guesses_.emplace_back();
    guess.token_id = token_id;
    model_.Predict(offer, {i, agreement.Next(i), offered.draft_prob[i], token_id}, &guess.prediction);
    survival *= guess.prediction.probability;
    survivals_.push_back(survival);
  }
  chains_.push_back(chain);
}

// What is read first of the row's offers.
void DraftPolicy::Prefetch(const PolicyDecideParams& p, int32_t r) const {
  const auto num_sources = static_cast<int32_t>(source_ids_.size());
  const Row& row = rows_[static_cast<size_t>(p.rows.table_rows[r])];
  for (int32_t s = 0; s < num_sources; ++s) {
    const Offered offered(p.offers, r, s);
    if (offered.count > 0) model_.Prefetch(row.request, s, offered.token_ids[0]);
  }
}

// The survivals of what is offered. Where there are too many offers to look at all, each row gets its share of what
// those before it left.
void DraftPolicy::Predict(const PolicyDecideParams& p) {
  chains_.clear();
  survivals_.clear();
  guesses_.clear();
  const auto num_sources = static_cast<int32_t>(source_ids_.size());
  has_many_offers_ = p.rows.num_rows * num_sources > kManyOffers;
  int32_t num_left = has_many_offers_ ? kManyOffers : kMaxLookedAt;
  int32_t num_chains_left = has_many_offers_ ? p.rows.num_rows : p.rows.num_rows * num_sources;
  for (int32_t r = 0; r < p.rows.num_rows; ++r) {
    const RowOffers offers(p.offers, r, num_sources);
    if (r + kRowsAhead < p.rows.num_rows) Prefetch(p, r + kRowsAhead);
    const Row& row = rows_[static_cast<size_t>(p.rows.table_rows[r])];
    const DraftPrefix prefix(p.rows, r);
    const size_t num_before = chains_.size();
    const int32_t first = has_many_offers_ ? BestOffer(offers, asked_) : 0;
    const int32_t end = has_many_offers_ ? first + 1 : num_sources;
    for (int32_t s = first; s < end; ++s) {
      const int32_t share = std::max(kLeastLookedAt, num_left / num_chains_left--);
      const int32_t count = std::min({share, offers[s].count, p.rows.max_draft_len[r], max_draft_len_});
      if (count == 0) continue;
      PredictChain(offers, row, BeginChain(prefix, r, s), count);
      num_left -= chains_.back().count - prefix.count;
    }
    if (chains_.size() == num_before && prefix.count > 0) chains_.push_back(BeginChain(prefix, r, kPrefixOnly));
  }
}

void DraftPolicy::Write(const PolicyDecideParams& p) const {
  int32_t num_drafts = 0, next_row = 0;
  p.cu_num_draft[0] = 0;
  for (size_t c = 0; c < chains_.size(); ++c) {
    const DraftChain& chain = chains_[c];
    const int32_t count = fill_.counts()[c];
    if (count == 0) continue;
    while (next_row < chain.row) p.cu_num_draft[++next_row] = num_drafts;
    const DraftPrefix prefix(p.rows, chain.row);
    const int32_t num_first = std::min(count, prefix.count);
    std::copy_n(prefix.token_ids, num_first, p.draft_token_ids + num_drafts);
    std::copy_n(prefix.sources, num_first, p.draft_sources + num_drafts);
    if (count > num_first) {
      const int32_t* offered = Offered(p.offers, chain.row, chain.source).token_ids;
      std::copy_n(offered, count - num_first, p.draft_token_ids + num_drafts + num_first);
      std::fill_n(p.draft_sources + num_drafts + num_first, count - num_first,
                  static_cast<int8_t>(source_ids_[static_cast<size_t>(chain.source)]));
    }
    num_drafts += count;
  }
  while (next_row < p.rows.num_rows) p.cu_num_draft[++next_row] = num_drafts;
}

Error DraftPolicy::Offer(const PolicyDecideParams& p) {
  if (Error error = CheckRows(p)) return error;
  if (Error error = asked_.Ask(p.rows, p.offers)) return error;
  if (Error error = asked_.CheckOffers(p.rows, p.offers)) return error;
  Score(p.rows);
  Predict(p);
  return nullptr;
}

Error DraftPolicy::Choose(const PolicyDecideParams& p) {
  if (Error error = CheckTimes(p)) return error;
  if (Error error = CheckRows(p)) return error;
  if (Error error = asked_.CheckOffers(p.rows, p.offers)) return error;
  Predict(p);
  Fill(p);
  return nullptr;
}

Error DraftPolicy::Decide(const PolicyDecideParams& p) {
  if (Error error = CheckTimes(p)) return error;
  if (Error error = Offer(p)) return error;
  Fill(p);
  return nullptr;
}

Error DraftPolicy::CheckTimes(const PolicyDecideParams& p) {
  if (p.num_outputs < 0) return "num_outputs: expected >= 0, got a negative number";
  if (p.max_num_chosen < 0) return "max_num_chosen: expected >= 0, got a negative number";
  if (!(p.least_gain >= 1)) return "least_gain: expected >= 1, got less";
  if (p.times.num_step_rows < 0 || p.times.num_times <= p.times.num_step_rows)
    return "times: expected at least one, got none";
  return DraftTimes(p.times, p.max_num_chosen).Check();
}

// Choose from what Predict found.
void DraftPolicy::Fill(const PolicyDecideParams& p) {
  const DraftTimes times(p.times, p.max_num_chosen);
  const DraftFill::Outcome outcome =
      fill_.Choose(chains_, survivals_, p.num_outputs, times, {belief_.value(), p.least_gain});
  Keep(p);
  Write(p);
  p.outcome[0] = outcome.num_tokens;
  p.outcome[1] = outcome.time;
  p.outcome[2] = static_cast<double>(survivals_.size());
  p.outcome[3] = times.most() == 0 ? std::numeric_limits<double>::infinity() : times[1] / times[0] - 1.0;
  p.outcome[4] = times[0];
}

}  // namespace fdsd
