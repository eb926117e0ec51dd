#pragma once
// A tree of drafts in the making, and which of its nodes are the most probable. Knows no source of drafts.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fdsd {

// Node 0 is the root: what the drafts follow. Equal tokens after one node are one node, and nodes follow their parents.
class DraftTree {
 public:
  static constexpr int32_t kRoot = 0;
  // Drafts of a request that branches: with its newest token they are the 64 bits of an attention mask.
  static constexpr int32_t kMaxDrafts = 63;

  struct Node {
    int32_t token_id;
    int32_t parent;
    int32_t depth;       // drafts up to it, itself included
    double probability;  // that it and all before it are accepted; at most the parent's
    int32_t first_child, next_sibling;
  };

  // How many nodes a request may have after `num_prefix` drafts.
  static int32_t MaxNodes(int32_t max_drafts, int32_t num_prefix) {
    return std::max(0, std::min(max_drafts, kMaxDrafts - num_prefix));
  }

  void Clear() { nodes_.assign(1, {-1, -1, 0, 1.0, -1, -1}); }

  // The node of this token after a parent; a new one has probability 0.
  int32_t Add(int32_t parent, int32_t token_id) {
    for (int32_t child = (*this)[parent].first_child; child >= 0; child = (*this)[child].next_sibling)
      if ((*this)[child].token_id == token_id) return child;
    const int32_t added = size();
    nodes_.push_back({token_id, parent, (*this)[parent].depth + 1, 0.0, -1, (*this)[parent].first_child});
    return (*this)[parent].first_child = added;
  }

  int32_t size() const { return static_cast<int32_t>(nodes_.size()); }
  const Node& operator[](int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  Node& operator[](int32_t node) { return nodes_[static_cast<size_t>(node)]; }

  // The most probable nodes, at most so many, of equals the first, and none with probability 0: each after its parent,
  // and a node's likeliest child right after it. So the first ones are a chain, the likeliest from each on. Valid until
  // the next call; afterwards nothing can be added.
  std::span<const int32_t> Choose(int32_t most) {
    order_.clear();
    for (int32_t node = 1; node < size(); ++node)
      if ((*this)[node].probability > 0) order_.push_back(node);
    const auto is_before = [&](int32_t a, int32_t b) {
      const double x = (*this)[a].probability, y = (*this)[b].probability;
      return x > y || (x == y && a < b);
    };
    const auto count = std::min(order_.size(), static_cast<size_t>(most));
    std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count), order_.end(), is_before);
    order_.resize(count);
    for (Node& node : nodes_) node.first_child = node.next_sibling = -1;
    for (size_t i = count; i-- > 0;) {
      Node& parent = (*this)[(*this)[order_[i]].parent];
      (*this)[order_[i]].next_sibling = parent.first_child;
      parent.first_child = order_[i];
    }
    size_t num_written = 0;
    for (int32_t node = (*this)[kRoot].first_child; node > kRoot;) {
      order_[num_written++] = node;
      if ((*this)[node].first_child >= 0) {
        node = (*this)[node].first_child;
        continue;
      }
      while (node > kRoot && (*this)[node].next_sibling < 0) node = (*this)[node].parent;
      if (node > kRoot) node = (*this)[node].next_sibling;
    }
    return order_;
  }

  // Write chosen nodes as a request's drafts; see DraftProposeParams.
  void Write(std::span<const int32_t> chosen, int32_t* token_ids, int32_t* parents) {
    places_.resize(nodes_.size());
    places_[kRoot] = -1;
    for (size_t i = 0; i < chosen.size(); ++i) {
      const Node& node = (*this)[chosen[i]];
      places_[static_cast<size_t>(chosen[i])] = static_cast<int32_t>(i);
      token_ids[i] = node.token_id;
      parents[i] = places_[static_cast<size_t>(node.parent)];
    }
  }

 private:
  std::vector<Node> nodes_;
  std::vector<int32_t> order_, places_;
};

// How much of a context's continuations were not seen yet, in occurrences: the longer it is, the less.
inline double UnseenWeight(int32_t length) {
  constexpr double kUnseen = 1.0;
  return kUnseen / std::max(length, 1);
}

}  // namespace fdsd
