#pragma once
// A text's own earlier text as it would be matched if no token of the copy had been replaced. Knows no drafts.
#include <cstdint>

#include "copy_trail.h"
#include "suffix_automaton.h"

namespace fdsd {

// Begins where the match of the text's end in the text breaks off: the token that was expected there takes the place of
// the one that came, and so at later replaced tokens. Ends when the plain match sees as much or something else.
//
// A function of the text alone: of every token, in order.
class SuffixCopy {
 public:
  // The text's next token is read; `own` does not hold it yet. `before`, `after`: the plain match of the text without
  // and with it.
  void Read(const SuffixAutomaton& own, int32_t token, SuffixMatch before, SuffixMatch after, int32_t max_context);

  // What the copy matches, `plain` being the longest plain match; length 0 = it has nothing to say.
  SuffixMatch Choose(SuffixMatch plain) const {
    return trail_.is_trusted() && !trail_.IsBeatenBy(plain.length) ? match_ : SuffixMatch{};
  }

  // The string it stands for; length 0 = the text's end is no copy with replaced tokens.
  SuffixMatch match() const { return match_; }

  // So many of its last tokens are the text's own.
  int32_t recent() const { return trail_.recent(); }

 private:
  // Shorter matches that break off are no copies: what n-gram decoding cannot see by default begins here.
  static constexpr int32_t kMinLength = 6;

  SuffixMatch match_;
  CopyTrail trail_;
};

}  // namespace fdsd
