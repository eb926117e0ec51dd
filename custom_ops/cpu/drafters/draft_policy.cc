#include "draft_policy.h"

#include <algorithm>
#include <limits>

#include "draft_offers.h"

namespace fdsd {
namespace {

// So much does the request before count in the rate of a request.
constexpr double kRateInherited = 0.5;

// Drafts that are not the likeliest after another are those of a source of its own.
AcceptanceModel MakeModel(const ControllerCreateParams& p) {
  constexpr double kBranchLogit = -1.5;
  std::vector<double> priors(p.prior_logits, p.prior_logits + p.num_sources);
  for (int32_t s = 0; p.makes_trees != 0 && s < p.num_sources; ++s) priors.push_back(p.prior_logits[s] + kBranchLogit);
  return AcceptanceModel(static_cast<int32_t>(priors.size()), priors.data());
}

}  // namespace

Error DraftPolicy::CheckCreate(const ControllerCreateParams& p) {
  if (p.num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  if (p.num_sources < 1 || p.num_sources > kMaxSources) return "num_sources: expected 1 to 8, got another number";
  if (p.max_draft_len < 1 || p.max_draft_len > AcceptanceModel::kMaxPositions)
    return "max_draft_len: expected 1 to 64, got another";
  return nullptr;
}

DraftPolicy::DraftPolicy(const ControllerCreateParams& p)
    : max_draft_len_(p.max_draft_len),
      makes_trees_(p.makes_trees != 0),
      source_ids_(p.source_ids, p.source_ids + p.num_sources),
      asked_(p),
      model_(MakeModel(p)),
      in_use_(static_cast<size_t>(p.num_table_rows), 0),
      requests_(in_use_.size(), 0),
      rates_(in_use_.size() * source_ids_.size(), 0.0),
      waits_(in_use_.size(), 0),
      open_(in_use_.size()),
      stats_(static_cast<size_t>(p.num_sources)),
      last_rates_(static_cast<size_t>(p.num_sources), 0.5) {}

Error DraftPolicy::CheckTableRows(const int32_t* table_rows, int32_t count) const {
  for (int32_t i = 0; i < count; ++i)
    if (table_rows[i] < 0 || static_cast<size_t>(table_rows[i]) >= in_use_.size())
      return "table_rows: expected 0 to num_table_rows - 1, got one outside";
  return nullptr;
}

Error DraftPolicy::Begin(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    const auto table_row = static_cast<size_t>(table_rows[i]);
    in_use_[table_row] = 1;
    requests_[table_row] = num_requests_++;
    waits_[table_row] = 0;
    open_[table_row].clear();
    for (size_t s = 0; s < source_ids_.size(); ++s)
      rates_[table_row * source_ids_.size() + s] = kRateInherited * last_rates_[s] + (1.0 - kRateInherited) * 0.5;
  }
  return nullptr;
}

Error DraftPolicy::Forget(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    const auto table_row = static_cast<size_t>(table_rows[i]);
    in_use_[table_row] = waits_[table_row] = 0;
    open_[table_row] = {};
    std::fill_n(&rates_[table_row * source_ids_.size()], source_ids_.size(), 0.0);
  }
  return nullptr;
}

Error DraftPolicy::CheckRows(const ControllerDecideParams& p) const {
  const ControllerRowsParams& x = p.rows;
  if (Error error = CheckTableRows(x.table_rows, x.num_rows)) return error;
  // Nearly always all are as they should be: so they are looked at together.
  bool is_inside = true, is_begun = true, has_text = true, has_lengths = true;
  for (int32_t r = 0; r < x.num_rows; ++r) {
    is_inside &= x.table_rows[r] < x.num_table_rows;
    is_begun &= in_use_[static_cast<size_t>(x.table_rows[r])] != 0;
    has_text &= x.num_tokens[r] >= 0 && x.num_tokens[r] <= x.max_tokens_per_row;
    has_lengths &= x.max_draft_len[r] >= 0;
  }
  if (!is_inside) return "table_rows: expected rows of token_table, got one outside";
  if (!is_begun) return "table_rows: expected table rows that were begun, got another";
  if (!has_text) return "num_tokens: expected at most a row of token_table, got another number";
  if (!has_lengths) return "max_draft_len: expected >= 0, got a negative length";
  if (p.offers.max_num_rows < x.num_rows) return "offers: expected room for every row, got less";
  if ((p.offers.parents != nullptr) != makes_trees_ || (p.draft_parents != nullptr) != makes_trees_)
    return "parents: expected some where trees are made, and none where not, got others";
  return DraftPrefix::Check(x);
}

void DraftPolicy::Write(const ControllerDecideParams& p) const {
  const OfferPlanes planes(p.offers, p.rows.num_rows, num_sources());
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
      const int32_t* offered = planes.at(chain.row, chain.source).token_ids;
      std::copy_n(offered, count - num_first, p.draft_token_ids + num_drafts + num_first);
      std::fill_n(p.draft_sources + num_drafts + num_first, count - num_first,
                  static_cast<int8_t>(source_ids_[static_cast<size_t>(chain.source)]));
    }
    num_drafts += count;
  }
  while (next_row < p.rows.num_rows) p.cu_num_draft[++next_row] = num_drafts;
}

Error DraftPolicy::Ask(const ControllerDecideParams& p) {
  if (Error error = CheckRows(p)) return error;
  if (Error error = asked_.Ask(p.rows, p.skipped_sources, p.offers)) return error;
  p.outcome[2] = asked_.CountOffered(p.rows, p.offers);
  return nullptr;
}

Error DraftPolicy::Offer(const ControllerDecideParams& p) {
  if (Error error = Ask(p)) return error;
  if (Error error = asked_.CheckOffers(p.rows, p.offers)) return error;
  Score(p.rows);
  Predict(p);
  return nullptr;
}

Error DraftPolicy::Choose(const ControllerDecideParams& p) {
  if (Error error = CheckTimes(p)) return error;
  if (Error error = CheckRows(p)) return error;
  if (Error error = asked_.CheckOffers(p.rows, p.offers)) return error;
  Predict(p);
  Fill(p);
  return nullptr;
}

Error DraftPolicy::Decide(const ControllerDecideParams& p) {
  if (Error error = CheckTimes(p)) return error;
  if (Error error = Offer(p)) return error;
  Fill(p);
  return nullptr;
}

Error DraftPolicy::CheckTimes(const ControllerDecideParams& p) const {
  if (p.num_outputs < 0) return "num_outputs: expected >= 0, got a negative number";
  if (p.max_num_chosen < 0) return "max_num_chosen: expected >= 0, got a negative number";
  if (!(p.least_gain >= 1)) return "least_gain: expected >= 1, got less";
  if (p.times.num_step_rows < 0 || p.times.num_times <= p.times.num_step_rows)
    return "times: expected at least one, got none";
  // Of a few rows few drafts can be chosen, and no other times are looked at.
  const int32_t num_prefix = p.rows.cu_num_prefix == nullptr ? 0 : p.rows.cu_num_prefix[p.rows.num_rows];
  const int64_t num_drafts = static_cast<int64_t>(p.rows.num_rows) * max_draft_len_ + std::max(num_prefix, 0);
  return DraftTimes(p.times, std::min<int64_t>(p.max_num_chosen, std::max<int64_t>(num_drafts, 1))).Check();
}

// Choose from what Predict found.
void DraftPolicy::Fill(const ControllerDecideParams& p) {
  const DraftTimes times(p.times, p.max_num_chosen);
  const DraftFill::Outcome outcome =
      fill_.Choose(chains(), accept_probs(), p.num_outputs, times, {calibration_.value(), p.least_gain});
  if (makes_trees_) MarkWanted();
  Keep(p);
  p.outcome[5] = 0.0;
  if (makes_trees_) {
    p.outcome[5] = static_cast<double>(WriteTrees(p));
  } else {
    Write(p);
  }
  p.outcome[0] = outcome.num_tokens;
  p.outcome[1] = outcome.time;
  p.outcome[2] = static_cast<double>(accept_probs().size());
  p.outcome[3] = times.most() == 0 ? std::numeric_limits<double>::infinity() : times[1] / times[0] - 1.0;
  p.outcome[4] = times[0];
}

}  // namespace fdsd
