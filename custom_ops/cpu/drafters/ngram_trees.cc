// What NgramIndex drafts where drafts may branch.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "draft_evidence.h"
#include "draft_tree.h"
#include "ngram_index.h"

namespace fdsd {
namespace {

// Occurrences that a tree is made of, and how much one counts that has a token less of the text's end than another.
constexpr int32_t kMaxOccurrences = 8;
constexpr double kShorter = 0.5;

// The continuations of a text as a tree, and how often each occurred.
class Continuations {
 public:
  void Clear() {
    tree_.Clear();
    weights_.assign(1, {});
  }

  // `tokens` followed an occurrence of the text's last `length` tokens.
  void Add(std::span<const int32_t> tokens, int32_t length, double weight) {
    int32_t node = DraftTree::kRoot;
    weights_[0].length = std::max(weights_[0].length, length);
    for (const int32_t token_id : tokens) {
      weights_[static_cast<size_t>(node)].of_children += weight;
      node = tree_.Add(node, token_id);
      ++length;
      if (node == static_cast<int32_t>(weights_.size())) weights_.push_back({0.0, 0.0, length});
      weights_[static_cast<size_t>(node)].own += weight;
    }
  }

  // Write the most probable ones; returns how many.
  int32_t Write(int32_t most, int32_t* drafts, int32_t* parents, float* draft_prob) {
    for (int32_t node = 1; node < tree_.size(); ++node)
      tree_[node].probability = tree_[tree_[node].parent].probability * Share(node);
    const std::span<const int32_t> chosen = tree_.Choose(most);
    tree_.Write(chosen, drafts, parents);
    for (size_t i = 0; draft_prob != nullptr && i < chosen.size(); ++i)
      draft_prob[i] = static_cast<float>(Share(chosen[i]));
    return static_cast<int32_t>(chosen.size());
  }

 private:
  struct Weight {
    double own = 0.0, of_children = 0.0;
    int32_t length = 0;  // tokens of the longest occurrence up to here
  };

  double Share(int32_t node) const {
    const Weight& parent = weights_[static_cast<size_t>(tree_[node].parent)];
    return weights_[static_cast<size_t>(node)].own / (parent.of_children + UnseenWeight(parent.length));
  }

  DraftTree tree_;
  std::vector<Weight> weights_;  // of each node
};

}  // namespace

int32_t NgramIndex::BranchRow(const DraftProposeParams& p, int32_t r, const Text& text, NgramMatch source) const {
  const int32_t most = DraftTree::MaxNodes(p.max_draft_len[r], text.num_prefix);
  if (source.length == 0 || most == 0) return 0;
  thread_local Continuations continuations;
  continuations.Clear();
  std::array<int32_t, kMaxOccurrences> ends;
  size_t num_ends = 0;
  int32_t path[DraftTree::kMaxDrafts];
  const auto add = [&](int32_t length, int32_t end, double weight) {
    if (std::find(ends.begin(), ends.begin() + num_ends, end) != ends.begin() + num_ends) return;
    ends[num_ends++] = end;
    const int32_t count = MaxDrafts(rule_.max_factor, length, most);
    for (int32_t i = 0; i < count; ++i) path[i] = text.at(static_cast<int64_t>(end) + i, path);
    continuations.Add({path, static_cast<size_t>(count)}, length, weight);
  };
  add(source.length, source.end, 1.0);
  const Row& table_row = rows_[static_cast<size_t>(p.table_rows[r])];
  const int64_t length = std::min<int64_t>(rule_.max_n, text.size());
  std::vector<int32_t> last_tokens;
  const int32_t* text_end = text.EndOf(text.size(), length, &last_tokens);
  double weight = 1.0;
  for (size_t t = table_row.tables.size(); t-- > 0;) {
    const NgramTable& table = table_row.tables[t];
    if (table.n() > length) continue;
    int32_t end = FindEnd(table, text, text_end, text.size());
    if (end == 0) continue;
    if (end <= table_row.num_indexed) {
      for (; end > 0 && num_ends < kMaxOccurrences; end = table.Earlier(end)) add(table.n(), end, weight);
    } else if (num_ends < kMaxOccurrences) {
      add(table.n(), end, weight);
    }
    weight *= kShorter;
  }
  const int64_t begin = begins_[static_cast<size_t>(r)];
  return continuations.Write(most, p.draft_token_ids + begin, p.draft_parents + begin,
                             p.draft_prob == nullptr ? nullptr : p.draft_prob + begin);
}

}  // namespace fdsd
