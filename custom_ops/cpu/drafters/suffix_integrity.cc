// Checks of the suffix structures against their definitions. Each returns the first thing found wrong.
#include <algorithm>
#include <vector>

#include "suffix_drafter.h"

namespace fdsd {

template <typename Visit>
void SuffixAutomaton::ForEachEdge(int32_t state, Visit&& visit) const {
  const int32_t edges = states_[state].edges;
  if (edges >= 0) visit(token(edges), edges);
  if (edges < kNone) edges_.ForEach(ToBlock(edges), visit);
}

Error SuffixAutomaton::CheckState(int32_t state) const {
  const State& s = states_[state];
  const auto num_states = static_cast<int32_t>(states_.size());
  if (state != kRoot) {
    if (s.link < 0 || s.link >= num_states) return "automaton: expected links to states, got another";
    if (states_[s.link].length >= s.length) return "automaton: expected links to shorter strings, got another";
    if (s.end < 0 || s.end >= text_.size() || text_[s.end] < 0)
      return "automaton: expected ends at tokens, got another";
    if (s.count < 1) return "automaton: expected every string to occur, got one that does not";
  }
  Error error = nullptr;
  int32_t num_edges = 0, max_count = 0;
  bool has_best = s.best == kNone;
  ForEachEdge(state, [&](int32_t edge_token, int32_t target) {
    ++num_edges;
    if (target <= kRoot || target >= num_states) {
      error = "automaton: expected transitions to states, got another";
      return;
    }
    if (token(target) != edge_token) error = "automaton: expected a state to be entered by one token, got two";
    if (states_[target].length <= s.length || states_[states_[target].link].length > s.length) {
      error = "automaton: expected transitions to append one token, got another";
    }
    if (state != kRoot && Find(s.link, edge_token) == kNone) {
      error = "automaton: expected an end of a string to have its continuations, found one missing";
    }
    max_count = std::max(max_count, states_[target].count);
    has_best = has_best || target == s.best;
  });
  if (error != nullptr) return error;
  if (!has_best || (s.best == kNone) != (num_edges == 0)) return "automaton: expected the best transition among all";
  if (num_edges > 0 && num_cut_counts_ == 0 && states_[s.best].count != max_count) {
    return "automaton: expected the best transition to be the most frequent, got another";
  }
  return nullptr;
}

Error SuffixAutomaton::CheckIntegrity() const {
  const int64_t num_states = states_.size();
  if (num_states > 2 * num_tokens_ + 1) return "automaton: expected at most two states per token, got more";
  std::vector<int64_t> longer_counts(static_cast<size_t>(num_states));
  for (int32_t state = 0; state < num_states; ++state) {
    if (Error error = CheckState(state)) return error;
    if (state != kRoot) longer_counts[static_cast<size_t>(states_[state].link)] += states_[state].count;
  }
  for (int32_t state = 1; state < num_states && num_cut_counts_ == 0; ++state) {
    if (states_[state].count < longer_counts[static_cast<size_t>(state)]) {
      return "automaton: expected a string to occur as often as the longer ones that end with it, got less";
    }
  }
  int64_t num_tokens = 0;
  for (int32_t i = 0; i < num_sequences(); ++i) num_tokens += CopySequence(i, nullptr);
  return num_tokens == num_tokens_ ? nullptr : "automaton: expected the sequences to hold all tokens, got others";
}

Error SuffixCache::CheckIntegrity() const {
  int64_t num_bytes = 0, num_outputs = 0, num_sequences = 0, num_tokens = 0;
  std::map<const SuffixSalt*, size_t> num_seen;
  for (auto shard = shards_.begin(); shard != shards_.end(); ++shard) {
    if (Error error = shard->automaton.CheckIntegrity()) return error;
    const SuffixSalt* salt = shard->salt;
    const size_t i = num_seen[salt]++;
    if (i >= salt->shards.size() || salt->shards[i] != shard) return "cache: expected a salt's shards by age";
    num_bytes += NumBytes(*shard);
    num_outputs += shard->num_outputs;
    num_sequences += shard->automaton.num_sequences();
    num_tokens += shard->automaton.num_tokens();
  }
  for (const SuffixShard& shard : dropped_) num_bytes += NumBytes(shard);
  for (const auto& [digest, salt] : salts_) {
    if (digest != salt.digest) return "cache: expected a salt under its digest, got another";
    if (salt.shards.size() != num_seen[&salt]) return "cache: expected a salt's shards in the cache, got others";
    if (salt.shards.empty() && salt.num_requests == 0) return "cache: expected salts in use, got another";
  }
  if (num_bytes != num_bytes_ || num_outputs != num_outputs_ || num_sequences != num_sequences_ ||
      num_tokens != num_tokens_) {
    return "cache: expected totals over all shards, got others";
  }
  if (num_bytes > limits_.max_bytes) return "cache: expected at most max_cached_bytes, got more";
  if (limits_.max_outputs >= 0 && num_outputs > limits_.max_outputs) {
    return "cache: expected at most max_cached_outputs, got more";
  }
  return nullptr;
}

Error SuffixDrafter::CheckRequest(const SuffixRequest& request) const {
  if (Error error = request.own_text.CheckIntegrity()) return error;
  if (request.own_text.num_tokens() != request.num_read || request.tail.length != request.num_read) {
    return "table_row: expected its own text to hold what was read, got another length";
  }
  const auto is_match = [&](const SuffixAutomaton& automaton, const SuffixMatch& match) {
    return match.state >= 0 && match.length >= 0 && match.length <= rule_.max_context &&
           match.length <= automaton.length(match.state);
  };
  if (!is_match(request.own_text, request.match)) return "table_row: expected a match of its own text, got another";
  if (!is_match(request.own_text, request.copy.match()))
    return "table_row: expected a copy of its own text, got another";
  const std::vector<SuffixMatch>& matches = request.matches;
  for (size_t i = 0; i < matches.size(); ++i) {
    // Shards that were dropped or added since are seen in the next step.
    const int64_t at = request.first_shard + static_cast<int64_t>(i) - request.salt->num_dropped;
    if (at < 0) continue;
    const SuffixAutomaton& automaton = request.salt->shards[static_cast<size_t>(at)]->automaton;
    if (!is_match(automaton, matches[i])) return "table_row: expected a match in a shard, got another";
  }
  return nullptr;
}

Error SuffixDrafter::CheckIntegrity() const {
  for (const auto& request : rows_) {
    if (request == nullptr) continue;
    if (Error error = CheckRequest(*request)) return error;
  }
  return cache_.CheckIntegrity();
}

}  // namespace fdsd
