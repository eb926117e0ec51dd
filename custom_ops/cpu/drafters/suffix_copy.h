#pragma once
// What the end of a text would match in the text before it, had no token of the copy been replaced. Knows no drafts.
#include <cstdint>

#include "copy_tracker.h"
#include "suffix_automaton.h"

namespace fdsd {

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
