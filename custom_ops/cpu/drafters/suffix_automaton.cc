#include "suffix_automaton.h"

#include <algorithm>

namespace fdsd {
namespace {

// Words of a chunk: a sequence wastes half of one on average.
constexpr int32_t kChunkWords = 32;
// Steps of one append that may go to counting. Text that people or programs write needs about ten; a token repeated n
// times would need n, and there only its shortest strings lose occurrences.
constexpr int32_t kMaxCountSteps = 128;

}  // namespace

SuffixAutomaton::SuffixAutomaton() { AddState(0, 0); }

int32_t SuffixAutomaton::AddState(int32_t length, int32_t end) {
  const auto state = static_cast<int32_t>(states_.Extend(1));
  states_[state] = {length, kNone, 0, end, kNone, kNone};
  return state;
}

int32_t SuffixAutomaton::Find(int32_t state, int32_t token) const {
  const int32_t edges = states_[state].edges;
  if (edges >= 0) return this->token(edges) == token ? edges : kNone;
  return edges == kNone ? kNone : edges_.Find(ToBlock(edges), token);
}

void SuffixAutomaton::AddEdge(int32_t state, int32_t token, int32_t target) {
  const int32_t edges = states_[state].edges;
  if (edges == kNone) {
    states_[state].edges = target;
  } else if (edges >= 0) {
    states_[state].edges = FromBlock(edges_.Make(this->token(edges), edges, token, target));
  } else {
    states_[state].edges = FromBlock(edges_.Add(ToBlock(edges), token, target));
  }
}

void SuffixAutomaton::ReplaceEdge(int32_t state, int32_t token, int32_t target) {
  int32_t& edges = states_[state].edges;
  if (edges >= 0) {
    edges = target;
  } else {
    edges_.Replace(ToBlock(edges), token, target);
  }
}

int32_t SuffixAutomaton::Write(int32_t token, SuffixTail* tail) {
  if (tail->next < 0 || tail->next % kChunkWords == 0) {
    const auto chunk = static_cast<int32_t>(text_.Extend(kChunkWords));
    std::fill(&text_[chunk], &text_[chunk] + kChunkWords, -1);
    if (tail->next < 0) {
      heads_[heads_.Extend(1)] = chunk;
    } else {
      text_[tail->next - kChunkWords] = chunk;
    }
    tail->next = chunk + 1;
  }
  text_[tail->next] = token;
  ++num_tokens_;
  return tail->next++;
}

int64_t SuffixAutomaton::CopySequence(int32_t i, int32_t* tokens) const {
  int64_t length = 0;
  for (int32_t chunk = heads_[i]; chunk != -1; chunk = text_[chunk]) {
    for (int32_t at = chunk + 1; at < chunk + kChunkWords && text_[at] != -1; ++at) {
      if (tokens != nullptr) tokens[length] = text_[at];
      ++length;
    }
  }
  return length;
}

void SuffixAutomaton::Append(int32_t token, SuffixTail* tail) {
  const int32_t end = Write(token, tail);
  int32_t state = tail->state;
  int32_t target = Find(state, token);
  int32_t added = kNone;
  if (target == kNone) {
    added = AddState(states_[state].length + 1, end);
    states_[added].count = 1;
    do {
      AddEdge(state, token, added);
      State& from = states_[state];
      // Equals go to the newer one.
      if (from.best == kNone || states_[from.best].count <= 1) from.best = added;
      state = from.link;
      ++num_steps_;
    } while (state != kNone && (target = Find(state, token)) == kNone);
  }
  if (state != kNone) {
    target = Separate(state, token, target);
    CountOccurrence(state, target);
  } else {
    target = kRoot;
  }
  if (added != kNone) states_[added].link = target;
  tail->state = added != kNone ? added : target;
  ++tail->length;
}

int32_t SuffixAutomaton::Separate(int32_t state, int32_t token, int32_t target) {
  const int32_t length = states_[state].length + 1;
  if (states_[target].length == length) return target;
  const int32_t clone = AddState(length, states_[target].end);
  const State& original = states_[target];
  states_[clone] = original;
  states_[clone].length = length;
  if (original.edges < kNone) {
    num_steps_ += SuffixEdges::Capacity(ToBlock(original.edges));
    states_[clone].edges = FromBlock(edges_.Copy(ToBlock(original.edges)));
  }
  states_[target].link = clone;
  for (; state != kNone && Find(state, token) == target; state = states_[state].link) {
    ReplaceEdge(state, token, clone);
    if (states_[state].best == target) states_[state].best = clone;
    ++num_steps_;
  }
  return clone;
}

// Count one more occurrence of all strings of `target` and of its links, which are the ends of the string just
// appended. `state` and its links are the states they were reached from: those of lengths length[link[t]] .. length[t]
// - 1 lead to t.
void SuffixAutomaton::CountOccurrence(int32_t state, int32_t target) {
  int32_t steps = 0;
  while (target != kRoot && steps < kMaxCountSteps) {
    const int32_t count = ++states_[target].count;
    const int32_t shortest = states_[states_[target].link].length;
    for (; state != kNone && states_[state].length >= shortest && steps < kMaxCountSteps; ++steps) {
      State& from = states_[state];
      if (count >= states_[from.best].count) from.best = target;
      state = from.link;
    }
    target = states_[target].link;
    ++steps;
  }
  num_steps_ += steps;
  if (target != kRoot) ++num_cut_counts_;
}

SuffixMatch SuffixAutomaton::Settle(SuffixMatch match, int32_t max_length) const {
  match.length = std::min(match.length, max_length);
  while (match.state != kRoot && match.length <= states_[states_[match.state].link].length) {
    match.state = states_[match.state].link;
  }
  return match;
}

SuffixMatch SuffixAutomaton::Advance(SuffixMatch match, int32_t token, int32_t max_length) const {
  match = Settle(match, max_length);
  int32_t target = Find(match.state, token);
  while (target == kNone && match.state != kRoot) {
    match.state = states_[match.state].link;
    match.length = states_[match.state].length;
    target = Find(match.state, token);
  }
  if (target == kNone) return {};
  return Settle({target, match.length + 1}, max_length);
}

int64_t SuffixAutomaton::Release(int64_t wanted) {
  if (states_.num_bytes() > 0) return states_.Release(wanted);
  if (text_.num_bytes() > 0) return text_.Release(wanted);
  if (edges_.num_bytes() > 0) return edges_.Release(wanted);
  return heads_.Release(wanted);
}

}  // namespace fdsd
