// What DraftPolicy makes of a row's offers where trees are made: one tree, whose drafts keep their sources.
#include <algorithm>

#include "draft_policy.h"

namespace fdsd {
namespace {

// After this, drafts are not worth looking at whatever they cost.
constexpr double kLeastAcceptance = 0.02;

}  // namespace

// Make the row's tree of the offers in looked_at_.
void DraftPolicy::Unite(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r) {
  tree_.Clear();
  marks_.assign(1, {});
  nodes_.clear();
  for (LookedAt& at : looked_at_) {
    const Offered offered = planes.at(r, at.source);
    const uint32_t bit = 1U << at.source;
    at.begin = static_cast<int32_t>(nodes_.size());
    for (int32_t i = 0; i < at.count; ++i) {
      const int32_t parent = offered.parents[i];
      const int32_t before = parent < 0 ? DraftTree::kRoot : nodes_[static_cast<size_t>(at.begin + parent)];
      const int32_t node = tree_.Add(before, offered.token_ids[i]);
      if (node == static_cast<int32_t>(marks_.size())) marks_.emplace_back();
      marks_[static_cast<size_t>(node)].offered |= bit;
      marks_[static_cast<size_t>(before)].followed |= bit;
      nodes_.push_back(node);
    }
  }
  for (size_t i = 0; i < looked_at_.size(); ++i) PredictTree(p, planes, r, i);
  looked_at_.clear();
  AddTree(p, r);
}

// The acceptance probabilities of one source's offer, as a chain of its own.
void DraftPolicy::PredictTree(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r, size_t looked_at) {
  const LookedAt& at = looked_at_[looked_at];
  const int32_t table_row = p.rows.table_rows[r];
  const uint32_t request = requests_[static_cast<size_t>(table_row)], others = ~(1U << at.source);
  const Offered offered = planes.at(r, at.source);
  OfferFacts facts{at.source, offered.evidence[0],       offered.evidence[1], offered.evidence[2],
                   request,   rate(table_row, at.source)};
  const AcceptanceModel::Offer likeliest = model_.Read(facts);
  facts.source += num_sources();
  const AcceptanceModel::Offer branch = model_.Read(facts);
  const DraftPrefix prefix(p.rows, r);
  DraftChain chain = BeginChain(prefix, r, at.source);
  double* accept_probs = accept_probs_.Extend(static_cast<size_t>(at.count)) - chain.count;
  Guess* guesses = guesses_.Extend(static_cast<size_t>(at.count)) - chain.count;
  kept_.assign(static_cast<size_t>(at.count) + 1, {});  // kept_[0]: what the offer follows
  kept_[0] = {chain.count - 1, -1, 1.0, false};
  for (int32_t i = 0; i < at.count; ++i) {
    Kept& before = kept_[static_cast<size_t>(offered.parents[i] + 1)];
    if (before.accept_prob <= kLeastAcceptance) continue;
    const int32_t node = nodes_[static_cast<size_t>(at.begin + i)], token_id = offered.token_ids[i];
    const int32_t g = chain.count++;
    Guess& guess = guesses[g];
    guess.token_id = token_id;
    guess.parent = static_cast<int16_t>(before.guess);
    guess.next_sibling = 0;
    guess.is_wanted = false;
    const bool is_first = before.last_child < 0;
    if (!is_first) guesses[before.last_child].next_sibling = static_cast<int8_t>(g - before.last_child);
    before.last_child = g;
    Mark& mark = marks_[static_cast<size_t>(node)];
    const bool is_same = (mark.offered & others) != 0;
    const uint32_t others_differ = marks_[static_cast<size_t>(tree_[node].parent)].followed & others & ~mark.offered;
    const bool differs = before.differs || others_differ != 0;
    const DraftFacts of_draft{tree_[node].depth - 1, is_same ? 1 : 2 * static_cast<int32_t>(differs),
                              offered.draft_prob[i], token_id};
    model_.Predict(is_first ? likeliest : branch, of_draft, &guess.prediction);
    const double probability = guess.prediction.probability;
    accept_probs[g] = 0.0;  // becomes that of the united draft if that has this source
    kept_[static_cast<size_t>(i) + 1] = {g, -1, before.accept_prob * probability, differs};
    if (probability > mark.probability) {
      mark.probability = probability;
      mark.guess = chain.begin + g;
      mark.source = at.source;
    }
  }
  accept_probs_.Cut(static_cast<size_t>(chain.begin + chain.count));
  guesses_.Cut(accept_probs_.size());
  *chains_.Extend(1) = chain;
}

// The most probable drafts of the row's tree, after its prefix.
void DraftPolicy::AddTree(const ControllerDecideParams& p, int32_t r) {
  const DraftPrefix prefix(p.rows, r);
  for (int32_t node = 1; node < tree_.size(); ++node)
    tree_[node].probability = tree_[tree_[node].parent].probability * marks_[static_cast<size_t>(node)].probability;
  const std::span<const int32_t> chosen = tree_.Choose(DraftTree::MaxNodes(p.rows.max_draft_len[r], prefix.count));
  const auto count = static_cast<size_t>(prefix.count) + chosen.size();
  if (count == 0) return;
  *trees_.Extend(1) = {r, 0, static_cast<int32_t>(tree_probs_.size()), static_cast<int32_t>(count), prefix.count};
  double* probs = tree_probs_.Extend(count);
  TreeDraft* drafts = tree_drafts_.Extend(count);
  for (int32_t i = 0; i < prefix.count; ++i) {
    probs[i] = 1.0;
    drafts[i] = {prefix.token_ids[i], i - 1, -1, prefix.sources[i]};
  }
  places_.resize(static_cast<size_t>(tree_.size()));
  places_[DraftTree::kRoot] = prefix.count - 1;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const auto node = static_cast<size_t>(chosen[i]);
    const size_t place = static_cast<size_t>(prefix.count) + i;
    places_[node] = static_cast<int32_t>(place);
    probs[place] = tree_[chosen[i]].probability;
    drafts[place] = {tree_[chosen[i]].token_id, places_[static_cast<size_t>(tree_[chosen[i]].parent)],
                     marks_[node].guess, source_ids_[static_cast<size_t>(marks_[node].source)]};
  }
}

// Tell the guesses which of them the step has.
void DraftPolicy::MarkWanted() {
  for (size_t i = 0; i < tree_drafts_.size(); ++i) {
    const int32_t guess = tree_drafts_[i].guess;
    if (guess < 0 || !fill_.wants(static_cast<int32_t>(i))) continue;
    guesses_.data()[guess].is_wanted = true;
    accept_probs_.data()[guess] = tree_probs_[i];
  }
}

int32_t DraftPolicy::CountWanted(const DraftChain& chain) const {
  const Guess* first = guesses_.data() + chain.begin;
  return static_cast<int32_t>(std::count_if(first, first + chain.count, [](const Guess& g) { return g.is_wanted; }));
}

// Returns whether any of them branches.
bool DraftPolicy::WriteTrees(const ControllerDecideParams& p) {
  int32_t num_drafts = 0, next_row = 0;
  bool branches = false;
  p.cu_num_draft[0] = 0;
  for (size_t t = 0; t < trees_.size(); ++t) {
    const DraftChain& tree = trees_[t];
    while (next_row < tree.row) p.cu_num_draft[++next_row] = num_drafts;
    places_.resize(static_cast<size_t>(tree.count));
    int32_t count = 0;
    for (int32_t i = 0; i < tree.count; ++i) {
      if (!fill_.wants(tree.begin + i)) continue;
      const TreeDraft& draft = tree_drafts_[static_cast<size_t>(tree.begin + i)];
      p.draft_token_ids[num_drafts + count] = draft.token_id;
      p.draft_sources[num_drafts + count] = static_cast<int8_t>(draft.source);
      p.draft_parents[num_drafts + count] = draft.parent < 0 ? -1 : places_[static_cast<size_t>(draft.parent)];
      branches |= p.draft_parents[num_drafts + count] != count - 1;
      places_[static_cast<size_t>(i)] = count++;
    }
    num_drafts += count;
  }
  while (next_row < p.rows.num_rows) p.cu_num_draft[++next_row] = num_drafts;
  return branches;
}

}  // namespace fdsd
