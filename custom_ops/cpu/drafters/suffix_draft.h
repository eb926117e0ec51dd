#pragma once
// The drafting rule: which of several automata's continuations becomes the draft, also after replaced tokens.
#include <cstdint>
#include <vector>

#include "copy_tracker.h"
#include "draft_evidence.h"
#include "suffix_automaton.h"

namespace fdsd {

// Ends of a match, itself and shorter ones, that are tried: more than a few rarely give the best draft.
constexpr int32_t kMaxAnchors = 4;

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
// `sources` is sorted by falling length of the match. `draft_prob`: as token_ids, nullptr = unwanted. `parents`:
// nullptr = a chain, else see BranchFromSuffixes.
//
// Source: Oliaro et al., SuffixDecoding, arXiv:2411.04975.
int32_t DraftFromSuffixes(const SuffixRule& rule, const std::vector<SuffixSource>& sources, int32_t budget,
                          int32_t* token_ids, int32_t* parents, float* draft_prob, DraftEvidence* evidence);

// The same as a tree, the most probable tokens first: all continuations of all matches and of a few of their shorter
// ends, each of which counts half of the one before. A token has the probability of the likeliest of these. `parents`:
// see DraftProposeParams.
int32_t BranchFromSuffixes(const SuffixRule& rule, const std::vector<SuffixSource>& sources, int32_t budget,
                           int32_t* token_ids, int32_t* parents, float* draft_prob, DraftEvidence* evidence);

// What the end of a text would match in the text before it, had no token of the copy been replaced.
//
// Begins where the plain match of the text's end breaks off: the expected token stands in for the one that came, and
// likewise at later replaced tokens. Ends when the plain match is at least as long as what agreed after the last
// replaced token.
//
// A function of the text alone: of every token, in order.
class SuffixCopy {
 public:
  // The text's next token is read; `own_text` does not hold it yet. `before`, `after`: the plain match of the text
  // without and with it.
  void Read(const SuffixAutomaton& own_text, int32_t token, SuffixMatch before, SuffixMatch after, int32_t max_context);

  // What the copy matches, `plain` being the longest plain match; length 0 = it has nothing to say.
  SuffixMatch Choose(SuffixMatch plain) const {
    return tracker_.is_trusted() && !tracker_.IsBeatenBy(plain.length) ? match_ : SuffixMatch{};
  }

  // The string it stands for; length 0 = the text's end is no copy with replaced tokens.
  SuffixMatch match() const { return match_; }

  // So many of its last tokens are the text's own.
  int32_t recent() const { return tracker_.recent(); }

 private:
  // A shorter match that breaks off is no copy: by default n-gram decoding looks up to 5 tokens, and sees those.
  static constexpr int32_t kMinLength = 6;

  SuffixMatch match_;
  CopyTracker tracker_;
};

}  // namespace fdsd
