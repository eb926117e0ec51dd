// What DraftPolicy expects of the drafts that are offered.
#include <algorithm>

#include "draft_offers.h"
#include "draft_policy.h"

namespace fdsd {
namespace {

// Drafts looked at in a step, so that deciding stays short against any step, but of every offer the first one.
constexpr int32_t kMaxLookedAt = 512, kLeastLookedAt = 1;
// Where sources could make more offers than this, one of each row is looked at, and so many drafts in all.
constexpr int32_t kManyOffers = 256;
// After this, drafts are not worth looking at whatever they cost.
constexpr double kLeastAcceptance = 0.02;
// What is predicted so much later is brought into the cache.
constexpr int32_t kRowsAhead = 4, kDraftsAhead = 6;

// Of a row's offers the one that knows most of the text. What the caller wrote comes first: a model matches nothing,
// and its drafts were asked for, and paid, as they promise more. Then the longest match, of equals the last one.
int32_t BestOffer(const OfferPlanes& planes, int32_t r, const AskedDrafters& asked) {
  constexpr int64_t kByCaller = int64_t{1} << 32;
  int32_t best = 0;
  int64_t most = -1;
  for (int32_t i = 0; i < planes.num_offering(); ++i) {
    const int32_t s = planes.offering(i);
    const Offered offered = planes.at(r, s);
    const int64_t knows = (asked.asks(s) ? 0 : kByCaller) + offered.evidence[0];
    const bool is_best = (offered.count > 0) & (knows >= most);
    best = is_best ? s : best;
    most = is_best ? knows : most;
  }
  return best;
}

}  // namespace

// Begin a chain of the row with its prefix.
DraftChain DraftPolicy::BeginChain(const DraftPrefix& prefix, int32_t r, int32_t source) {
  const auto begin = static_cast<int32_t>(accept_probs_.size());
  if (prefix.count > 0) {
    const auto count = static_cast<size_t>(prefix.count);
    std::fill_n(accept_probs_.Extend(count), count, 1.0);
    Guess* guesses = guesses_.Extend(count);
    for (size_t i = 0; i < count; ++i) guesses[i] = {prefix.token_ids[i], static_cast<int16_t>(i - 1), 0, false, {}};
  }
  return {r, source, begin, prefix.count, prefix.count};
}

// Returns how many drafts of the chain's source were added to what it has.
int32_t DraftPolicy::PredictChain(const OfferPlanes& planes, int32_t table_row, const DraftChain& begun,
                                  int32_t max_drafts) {
  const uint32_t request = requests_[static_cast<size_t>(table_row)];
  const Offered offered = planes.at(begun.row, begun.source);
  const AcceptanceModel::Offer offer = model_.Read({begun.source, offered.evidence[0], offered.evidence[1],
                                                    offered.evidence[2], request, rate(table_row, begun.source)});
  Agreement agreement(planes, begun.row, begun.source);
  for (int32_t i = 1; i < std::min(max_drafts, kDraftsAhead); ++i)
    model_.Prefetch(request, begun.source, offered.token_ids[i]);
  const size_t first = accept_probs_.size();
  double* accept_probs = accept_probs_.Extend(static_cast<size_t>(max_drafts));
  Guess* guesses = guesses_.Extend(static_cast<size_t>(max_drafts));
  double accept_prob = 1.0;
  int32_t count = 0;
  if (max_drafts == 1) {  // nothing waits for its probability; see FinishFirst
    guesses[0].token_id = offered.token_ids[0];
    guesses[0].parent = static_cast<int16_t>(begun.num_certain - 1);
    guesses[0].next_sibling = 0;
    const DraftFacts facts{0, agreement.Next(0), offered.draft_prob[0], offered.token_ids[0]};
    accept_probs[0] = model_.Read(offer, facts, &guesses[0].prediction);
    *unfinished_.Extend(1) = static_cast<int32_t>(first);
    count = 1;
  }
  while (count < max_drafts && accept_prob > kLeastAcceptance) {
    const int32_t i = count++, token_id = offered.token_ids[i];
    if (i + kDraftsAhead < max_drafts) model_.Prefetch(request, begun.source, offered.token_ids[i + kDraftsAhead]);
    guesses[i].token_id = token_id;
    guesses[i].parent = static_cast<int16_t>(begun.num_certain + i - 1);
    guesses[i].next_sibling = 0;
    model_.Predict(offer, {i, agreement.Next(i), offered.draft_prob[i], token_id}, &guesses[i].prediction);
    accept_prob *= guesses[i].prediction.probability;
    accept_probs[i] = accept_prob;
  }
  accept_probs_.Cut(first + static_cast<size_t>(count));
  guesses_.Cut(accept_probs_.size());
  // Written as a whole: a copy of what was just changed would wait for that.
  *chains_.Extend(1) = {begun.row, begun.source, begun.begin, begun.num_certain + count, begun.num_certain};
  return count;
}

// The probabilities of drafts that are alone in what is looked at of their offers.
void DraftPolicy::FinishFirst() {
  double* accept_probs = accept_probs_.data();
  Guess* guesses = guesses_.data();
  for (size_t i = 0; i < unfinished_.size(); ++i) {
    const auto at = static_cast<size_t>(unfinished_[i]);
    accept_probs[at] = guesses[at].prediction.probability = AcceptanceModel::ToProbability(accept_probs[at]);
  }
}

// Look at the first drafts of an offer, at most `max_drafts` of them. Returns how many.
int32_t DraftPolicy::LookAt(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r, int32_t source,
                            int32_t max_drafts) {
  const int32_t count = std::min({max_drafts, planes.at(r, source).count, p.rows.max_draft_len[r], max_draft_len_});
  if (count == 0) return 0;
  if (makes_trees_) {
    looked_at_.push_back({source, count, 0});
    return count;
  }
  return PredictChain(planes, p.rows.table_rows[r], BeginChain(DraftPrefix(p.rows, r), r, source), count);
}

// The row's prefix is a chain where nothing is offered after it.
void DraftPolicy::AddPrefixOnly(const ControllerDecideParams& p, int32_t r) {
  const DraftPrefix prefix(p.rows, r);
  if (prefix.count > 0) *chains_.Extend(1) = BeginChain(prefix, r, kPrefixOnly);
}

// All offers of the row are looked at.
void DraftPolicy::FinishRow(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r,
                            size_t num_chains_before) {
  if (makes_trees_) {
    Unite(p, planes, r);
  } else if (chains_.size() == num_chains_before) {
    AddPrefixOnly(p, r);
  }
}

void DraftPolicy::PrefetchCells(const ControllerDecideParams& p, const OfferPlanes& planes, RowSource at) const {
  const Offered offered = planes.at(at.row, at.source);
  if (offered.count > 0)
    model_.Prefetch(requests_[static_cast<size_t>(p.rows.table_rows[at.row])], at.source, offered.token_ids[0]);
}

// The acceptance probabilities of what is offered. Where there are too many offers to look at all, each row gets its
// share of what those before it left.
void DraftPolicy::Predict(const ControllerDecideParams& p) {
  chains_.Cut(0);
  accept_probs_.Cut(0);
  guesses_.Cut(0);
  unfinished_.Cut(0);
  trees_.Cut(0);
  tree_probs_.Cut(0);
  tree_drafts_.Cut(0);
  const OfferPlanes planes(p.offers, p.rows.num_rows, num_sources());
  has_many_offers_ = p.rows.num_rows * num_sources() > kManyOffers;
  if (has_many_offers_) {
    PredictBest(p, planes);
  } else {
    PredictAll(p, planes);
  }
  FinishFirst();
}

// Of every row all offers.
void DraftPolicy::PredictAll(const ControllerDecideParams& p, const OfferPlanes& planes) {
  const int32_t num_rows = p.rows.num_rows;
  int32_t num_left = kMaxLookedAt, num_chains_left = num_rows * num_sources();
  for (int32_t next = 0; next < num_rows + kRowsAhead; ++next) {
    for (int32_t i = 0; next < num_rows && i < planes.num_offering(); ++i)
      PrefetchCells(p, planes, {next, planes.offering(i)});
    const int32_t r = next - kRowsAhead;
    if (r < 0) continue;
    const size_t num_before = chains_.size();
    for (int32_t s = 0; s < num_sources(); ++s)
      num_left -= LookAt(p, planes, r, s, std::max(kLeastLookedAt, num_left / num_chains_left--));
    FinishRow(p, planes, r, num_before);
  }
}

// Of every row the best offer. Rows that have none are left out before, without branches, as no one foresees them.
void DraftPolicy::PredictBest(const ControllerDecideParams& p, const OfferPlanes& planes) {
  const int32_t num_rows = p.rows.num_rows;
  best_.resize(static_cast<size_t>(num_rows));
  size_t num_best = 0;
  for (int32_t r = 0; r < num_rows; ++r) {
    const int32_t source = BestOffer(planes, r, asked_);
    best_[num_best] = {r, source};
    const bool has_any = (planes.at(r, source).count > 0) & (p.rows.max_draft_len[r] > 0);
    num_best += has_any | (DraftPrefix(p.rows, r).count > 0) ? 1 : 0;
  }
  int32_t num_left = kManyOffers;
  for (size_t i = 0; i < num_best; ++i) {
    if (i + kRowsAhead < num_best) PrefetchCells(p, planes, best_[i + kRowsAhead]);
    const RowSource& at = best_[i];
    const size_t num_before = chains_.size();
    num_left -= LookAt(p, planes, at.row, at.source, std::max(kLeastLookedAt, num_left / (num_rows - at.row)));
    FinishRow(p, planes, at.row, num_before);
  }
}

}  // namespace fdsd
