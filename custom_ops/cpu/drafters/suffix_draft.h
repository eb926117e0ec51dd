#pragma once
// The drafting rule: which of several automata's continuations becomes the draft. Changes nothing.
#include <cstdint>
#include <vector>

#include "draft_evidence.h"
#include "suffix_automaton.h"

namespace fdsd {

struct SuffixRule {
  int32_t max_context;    // tokens of the context that are told apart
  double max_factor;      // drafts per token of the matched context, at most
  double min_token_prob;  // the drafts' joint probability, at least
  bool follows_copies;    // see SuffixCopy; without, a match ends at a replaced token
};

// Where a request's context was found in one automaton.
struct SuffixSource {
  const SuffixAutomaton* automaton;
  SuffixMatch match;    // the longest end of the context that occurs
  int32_t tail_state;   // state of the request's own sequence there, kNone without one
  int32_t tail_length;  // so many of the match's last tokens, at most, are that sequence's too; 0 = not known of any
  int32_t recent;       // tokens after the last one that was put back into the match; at least its length = none was
  bool is_own;          // the request's own text
};

// Guess what follows and return how many tokens, at most `budget`, are written to token_ids.
//
// From the match and a few of its shorter ends, each with the most frequent continuation. The probability of a token is
// its count over that of the string before it; the end of the request's own text is left out. A draft ends before its
// joint probability falls below min_token_prob, and is at most max_factor times as long as the match. The score is the
// sum of the joint probabilities: the number of tokens to be accepted if they were true. The best score wins; of equals
// the longer match, then the earlier source. A continuation that reaches the end of the request's own text goes on
// after the longest end of the text that occurred before. So a repeated phrase is repeated further.
//
// `sources` is sorted by falling length of the match. `draft_prob`: as token_ids, nullptr = unwanted.
//
// Source: Oliaro et al., SuffixDecoding, arXiv:2411.04975.
int32_t DraftFromSuffixes(const SuffixRule& rule, const std::vector<SuffixSource>& sources, int32_t budget,
                          int32_t* token_ids, float* draft_prob, DraftEvidence* evidence);

}  // namespace fdsd
