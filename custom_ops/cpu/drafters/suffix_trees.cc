// Suffix decoding where drafts may branch.
#include <algorithm>
#include <span>
#include <tuple>

#include "draft_evidence.h"
#include "draft_tree.h"
#include "suffix_draft.h"

namespace fdsd {
namespace {

// States with more continuations than this go on with the most frequent one.
constexpr int32_t kMaxContinuations = 64;
// Each token of a tree is looked at a few times, as several matches lead to it.
constexpr int32_t kMaxLooks = 4;
// How much the continuations of a shorter match count.
constexpr double kShorterMatch = 0.5;

// Grows a tree by the likeliest token that may come next, wherever that is.
class Branching {
 public:
  Branching(const SuffixRule& rule, std::span<const SuffixSource> sources, int32_t budget)
      : rule_(rule), sources_(sources), budget_(budget) {
    tree_.Clear();
    origins_.assign(1, {});
    steps_.clear();
  }

  int32_t Run(int32_t* token_ids, int32_t* parents, float* draft_prob, DraftEvidence* evidence) {
    double weight = 1.0;
    for (size_t s = 0; s < sources_.size(); ++s) weight = BeginAt(static_cast<int32_t>(s), weight);
    for (int32_t i = 0; i < kMaxLooks * budget_ && !steps_.empty() && tree_.size() <= budget_; ++i) Take();
    const std::span<const int32_t> chosen = tree_.Choose(budget_);
    if (chosen.empty()) return 0;
    tree_.Write(chosen, token_ids, parents);
    for (size_t i = 0; draft_prob != nullptr && i < chosen.size(); ++i)
      draft_prob[i] = origins_[static_cast<size_t>(chosen[i])].counted;
    const Origin& first = origins_[static_cast<size_t>(chosen[0])];
    const SuffixSource& source = sources_[static_cast<size_t>(first.source)];
    *evidence = {first.matched, std::min(first.matched, source.recent), source.is_own ? 0 : 1};
    return static_cast<int32_t>(chosen.size());
  }

 private:
  // A token that may follow a node of the tree.
  struct Step {
    double probability;  // of the path
    int32_t source;
    int32_t state;  // with it
    int32_t matched;
    int32_t parent;
    float counted;
    bool is_best;

    // The likeliest first; the rest only makes the order one.
    bool operator<(const Step& other) const {
      return std::tie(probability, other.source, is_best, state, other.parent) <
             std::tie(other.probability, source, other.is_best, other.state, parent);
    }
  };
  struct Origin {
    int32_t source = 0, matched = 0;
    float counted = 0.0F;
  };

  // Begin with a source's match and its shorter ends, the first of which counts `weight`; returns what the next counts.
  double BeginAt(int32_t s, double weight) {
    const SuffixSource& source = sources_[static_cast<size_t>(s)];
    const SuffixAutomaton& a = *source.automaton;
    SuffixMatch anchor = source.match;
    for (int32_t num_tried = 0; anchor.state != SuffixAutomaton::kRoot && num_tried < kMaxAnchors;) {
      if (a.best(anchor.state) != SuffixAutomaton::kNone) {
        const int32_t num_open_ends = anchor.length <= source.tail_length ? 1 : 0;
        Follow({weight, s, anchor.state, anchor.length, DraftTree::kRoot, 0.0F, true}, num_open_ends);
        weight *= kShorterMatch;
        ++num_tried;
      }
      anchor.state = a.link(anchor.state);
      anchor.length = a.length(anchor.state);
    }
    return weight;
  }

  void Take() {
    std::pop_heap(steps_.begin(), steps_.end());
    Step step = steps_.back();
    steps_.pop_back();
    step.parent = tree_.Add(step.parent, sources_[static_cast<size_t>(step.source)].automaton->token(step.state));
    if (step.parent == static_cast<int32_t>(origins_.size())) {
      tree_[step.parent].probability = step.probability;
      origins_.push_back({step.source, step.matched, step.counted});
    }
    if (tree_[step.parent].depth < MaxDrafts(rule_.max_factor, step.matched, budget_)) Follow(step, 0);
  }

  // Add what may follow a step, whose token is `parent`.
  void Follow(const Step& step, int32_t num_open_ends) {
    const SuffixSource& source = sources_[static_cast<size_t>(step.source)];
    const SuffixAutomaton& a = *source.automaton;
    int32_t state = step.state;
    if (a.best(state) == SuffixAutomaton::kNone) {
      if (state != source.tail_state) return;
      while (state != SuffixAutomaton::kRoot && a.best(state) == SuffixAutomaton::kNone) state = a.link(state);
      if (state == SuffixAutomaton::kRoot) return;
      num_open_ends = 1;
    }
    const int32_t num_continued = std::max(1, a.count(state) - num_open_ends);
    const double all = num_continued + UnseenWeight(step.matched + tree_[step.parent].depth);
    a.ForEachNext(state, kMaxContinuations, [&](int32_t next) {
      const int32_t count = std::min(a.count(next), num_continued);
      const double probability = step.probability * count / all;
      if (probability < rule_.min_token_prob) return;
      const float counted = static_cast<float>(count) / static_cast<float>(num_continued + 1);
      steps_.push_back({probability, step.source, next, step.matched, step.parent, counted, next == a.best(state)});
      std::push_heap(steps_.begin(), steps_.end());
    });
  }

  const SuffixRule& rule_;
  const std::span<const SuffixSource> sources_;
  const int32_t budget_;
  static thread_local DraftTree tree_;
  static thread_local std::vector<Origin> origins_;  // of each node
  static thread_local std::vector<Step> steps_;      // a heap
};

thread_local DraftTree Branching::tree_;
thread_local std::vector<Branching::Origin> Branching::origins_;
thread_local std::vector<Branching::Step> Branching::steps_;

}  // namespace

int32_t BranchFromSuffixes(const SuffixRule& rule, const std::vector<SuffixSource>& sources, int32_t budget,
                           int32_t* token_ids, int32_t* parents, float* draft_prob, DraftEvidence* evidence) {
  return budget == 0 ? 0 : Branching(rule, sources, budget).Run(token_ids, parents, draft_prob, evidence);
}

}  // namespace fdsd
