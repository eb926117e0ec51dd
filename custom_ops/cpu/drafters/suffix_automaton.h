#pragma once
// A suffix automaton of several token sequences that all may grow: every substring, how often it occurs and what
// follows it most often. Knows no requests and no drafts.
#include <cstdint>

#include "fdsd/status.h"
#include "prefetch.h"
#include "suffix_edges.h"
#include "suffix_memory.h"

namespace fdsd {

// A string that occurs in an automaton's text: the one of `length` tokens among those that `state` stands for.
struct SuffixMatch {
  int32_t state = 0;
  int32_t length = 0;
};

// The end of a sequence that an automaton holds, where it grows.
struct SuffixTail {
  int32_t state = 0;   // stands for the whole sequence, its longest string
  int32_t length = 0;  // of the sequence
  int32_t next = -1;   // where in the text its next token goes; -1 = before its first token
};

// Every state stands for the strings that occur at the same ends, of lengths length[link] + 1 .. length; the root,
// state 0, for the empty one. A transition by a token leads to the state of the string with that token appended.
//
// Source: Blumer et al., The smallest automaton recognizing the subwords of a text, 1985; Mohri et al., General suffix
// automaton construction algorithm and space bounds, 2009. The most frequent continuation is kept as in Arctic
// Inference's suffix decoding, which keeps it in trees.
class SuffixAutomaton {
 public:
  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kNone = -1;

  SuffixAutomaton();

  // Append a token to a sequence; a tail that is new starts one. This takes a constant number of steps on average over
  // one sequence, plus copies of transitions. Where several sequences grow in turn, a state split for one may lengthen
  // the path of another.
  void Append(int32_t token, SuffixTail* tail);

  // Extend a match by a token: the longest end of (match + token) that occurs, of at most max_length tokens.
  // At most max_length steps, a constant number on average.
  SuffixMatch Advance(SuffixMatch match, int32_t token, int32_t max_length) const;

  // The same string where it is now, as appending may have given a state's shorter strings to a new state; of a string
  // longer than max_length its end.
  SuffixMatch Settle(SuffixMatch match, int32_t max_length) const;

  // Have a state brought into the cache.
  void Prefetch(int32_t state) const { BringIn(&states_[state]); }

  int32_t length(int32_t state) const { return states_[state].length; }
  int32_t link(int32_t state) const { return states_[state].link; }
  // Occurrences of each string of the state. Exact unless counting was cut short, see num_cut_counts.
  int32_t count(int32_t state) const { return states_[state].count; }
  // The state after the most frequent continuation, of equals the one that occurred last; kNone without continuation.
  int32_t best(int32_t state) const { return states_[state].best; }
  // The token of every transition into the state.
  int32_t token(int32_t state) const { return text_[states_[state].end]; }

  // Call visit(state) for the state after each continuation, in any order; where there may be more than `most`, for
  // the most frequent one alone.
  template <typename Visit>
  void ForEachNext(int32_t state, int32_t most, Visit&& visit) const {
    const int32_t edges = states_[state].edges;
    if (edges >= 0) {
      visit(edges);
    } else if (edges != kNone && SuffixEdges::Capacity(ToBlock(edges)) > most) {
      visit(best(state));
    } else if (edges != kNone) {
      edges_.ForEach(ToBlock(edges), [&](int32_t, int32_t target) { visit(target); });
    }
  }

  int64_t num_tokens() const { return num_tokens_; }
  int32_t num_sequences() const { return static_cast<int32_t>(heads_.size()); }
  int64_t num_bytes() const {
    return text_.num_bytes() + states_.num_bytes() + edges_.num_bytes() + heads_.num_bytes() +
           static_cast<int64_t>(sizeof(*this));
  }
  // Elementary steps of all appends: states visited, pairs copied.
  int64_t num_steps() const { return num_steps_; }
  // Appends that left the counts of their shortest strings alone because the text repeats itself too deeply.
  int64_t num_cut_counts() const { return num_cut_counts_; }

  // Tokens of sequence i; written to `tokens` unless that is nullptr.
  int64_t CopySequence(int32_t i, int32_t* tokens) const;

  // Give back up to `wanted` bytes and return how many, 0 when nothing is left. Nothing else may be called afterwards.
  int64_t Release(int64_t wanted);

  // Check every state against the definition, as far as that takes time proportional to the size.
  Error CheckIntegrity() const;

 private:
  // `edges`: kNone, the target of the only transition, or -2 - block of several.
  struct State {
    int32_t length;
    int32_t link;
    int32_t count;
    int32_t end;  // where in the text an occurrence ends
    int32_t edges;
    int32_t best;
  };

  static int32_t FromBlock(int32_t block) { return -2 - block; }
  static int32_t ToBlock(int32_t edges) { return -2 - edges; }

  int32_t Find(int32_t state, int32_t token) const;
  void AddEdge(int32_t state, int32_t token, int32_t target);
  void ReplaceEdge(int32_t state, int32_t token, int32_t target);
  template <typename Visit>
  void ForEachEdge(int32_t state, Visit&& visit) const;

  int32_t Write(int32_t token, SuffixTail* tail);
  int32_t AddState(int32_t length, int32_t end);
  // The state of (the strings of `state` up to its longest) + token; splits `target` if that stands for longer ones
  // too.
  int32_t Separate(int32_t state, int32_t token, int32_t target);
  void CountOccurrence(int32_t state, int32_t target);
  Error CheckState(int32_t state) const;

  MappedArray<State> states_;
  MappedArray<int32_t> text_;   // chunks: the next chunk of the same sequence or -1, then tokens, -1 = none yet
  MappedArray<int32_t> heads_;  // first chunk of each sequence
  SuffixEdges edges_;
  int64_t num_tokens_ = 0;
  int64_t num_steps_ = 0;
  int64_t num_cut_counts_ = 0;
};

}  // namespace fdsd
