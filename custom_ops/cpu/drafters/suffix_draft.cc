#include "suffix_draft.h"

#include <algorithm>

#include "draft_evidence.h"

namespace fdsd {
namespace {

struct Draft {
  const SuffixSource* source = nullptr;
  SuffixMatch anchor;
  int32_t num_tokens = 0;
  double score = 0.0;
};

// Follows the most frequent continuation of an anchor, token by token.
class Walk {
 public:
  Walk(const SuffixSource& source, SuffixMatch anchor) : source_(source), state_(anchor.state) {
    // The anchor is an end of the request's own text there: that occurrence has no continuation yet.
    if (anchor.length <= source.tail_length) num_open_ends_ = 1;
  }

  // Go one token further; false = nothing follows.
  bool Next() {
    const SuffixAutomaton& a = *source_.automaton;
    if (a.best(state_) == SuffixAutomaton::kNone) {
      if (state_ != source_.tail_state) return false;
      while (state_ != SuffixAutomaton::kRoot && a.best(state_) == SuffixAutomaton::kNone) state_ = a.link(state_);
      if (state_ == SuffixAutomaton::kRoot) return false;
      num_open_ends_ = 1;
    }
    const int32_t next = a.best(state_);
    const int32_t num_continued = std::max(1, a.count(state_) - num_open_ends_);
    probability_ *= std::min(1.0, static_cast<double>(a.count(next)) / num_continued);
    counted_ = static_cast<float>(std::min(a.count(next), num_continued)) / static_cast<float>(num_continued + 1);
    state_ = next;
    num_open_ends_ = 0;
    return true;
  }

  double probability() const { return probability_; }
  // Of the last token, see DraftEvidence.
  float counted() const { return counted_; }
  int32_t token() const { return source_.automaton->token(state_); }

 private:
  const SuffixSource& source_;
  int32_t state_;
  int32_t num_open_ends_ = 0;
  double probability_ = 1.0;
  float counted_ = 0.0F;
};

Draft Try(const SuffixRule& rule, const SuffixSource& source, SuffixMatch anchor, int32_t max_tokens) {
  Draft draft{&source, anchor, 0, 0.0};
  Walk walk(source, anchor);
  while (draft.num_tokens < max_tokens && walk.Next() && walk.probability() >= rule.min_token_prob) {
    draft.score += walk.probability();
    ++draft.num_tokens;
  }
  return draft;
}

// Whether a draft of this score and match would replace `best`.
bool Wins(double score, int32_t match_length, const Draft& best) {
  return score > best.score || (score == best.score && score > 0 && match_length > best.anchor.length);
}

void TryAnchors(const SuffixRule& rule, const SuffixSource& source, int32_t budget, Draft* best) {
  const SuffixAutomaton& a = *source.automaton;
  SuffixMatch anchor = source.match;
  for (int32_t num_tried = 0; anchor.state != SuffixAutomaton::kRoot && num_tried < kMaxAnchors;) {
    const int32_t max_tokens = MaxDrafts(rule.max_factor, anchor.length, budget);
    // Every probability is at most 1, and shorter anchors allow no more tokens.
    if (!Wins(max_tokens, anchor.length, *best)) return;
    if (a.best(anchor.state) != SuffixAutomaton::kNone) {
      const Draft draft = Try(rule, source, anchor, max_tokens);
      if (Wins(draft.score, anchor.length, *best)) *best = draft;
      ++num_tried;
    }
    anchor.state = a.link(anchor.state);
    anchor.length = a.length(anchor.state);
  }
}

}  // namespace

int32_t DraftFromSuffixes(const SuffixRule& rule, const std::vector<SuffixSource>& sources, int32_t budget,
                          int32_t* token_ids, int32_t* parents, float* draft_prob, DraftEvidence* evidence) {
  if (parents != nullptr) return BranchFromSuffixes(rule, sources, budget, token_ids, parents, draft_prob, evidence);
  Draft best;
  for (const SuffixSource& source : sources) TryAnchors(rule, source, budget, &best);
  if (best.num_tokens == 0) return 0;
  Walk walk(*best.source, best.anchor);
  for (int32_t i = 0; i < best.num_tokens; ++i) {
    walk.Next();
    token_ids[i] = walk.token();
    if (draft_prob != nullptr) draft_prob[i] = walk.counted();
  }
  const int32_t matched = best.anchor.length;
  *evidence = {matched, std::min(matched, best.source->recent), best.source->is_own ? 0 : 1};
  return best.num_tokens;
}

namespace {

// The match with its most frequent continuation, length 0 if nothing follows it.
SuffixMatch Continue(const SuffixAutomaton& own_text, SuffixMatch match, int32_t max_context) {
  match = own_text.Settle(match, max_context);
  const int32_t next = own_text.best(match.state);
  return next == SuffixAutomaton::kNone ? SuffixMatch{} : own_text.Settle({next, match.length + 1}, max_context);
}

}  // namespace

void SuffixCopy::Read(const SuffixAutomaton& own_text, int32_t token, SuffixMatch before, SuffixMatch after,
                      int32_t max_context) {
  const auto goes_on = [&](SuffixMatch match, SuffixMatch next) {
    return next.length == std::min(match.length + 1, max_context);
  };
  if (match_.length == 0) {
    if (before.length < kMinLength || goes_on(before, after)) return;
    match_ = before;
    tracker_.Begin(before.length);
  }
  const SuffixMatch next = own_text.Advance(match_, token, max_context);
  const bool agrees = goes_on(match_, next);
  const bool survives = tracker_.Follow(agrees, kMinLength);
  match_ = agrees ? next : survives ? Continue(own_text, match_, max_context) : SuffixMatch{};
  const bool is_beaten = tracker_.recent() > 0 && tracker_.IsBeatenBy(after.length);
  if (is_beaten || after.length >= match_.length) match_ = {};
}

}  // namespace fdsd
