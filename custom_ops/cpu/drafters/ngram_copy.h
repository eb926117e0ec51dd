#pragma once
// The stretch of a text that its end may be a copy of. Knows places in the text, not its tokens.
#include <algorithm>
#include <cstdint>

#include "copy_tracker.h"
#include "ngram_table.h"

namespace fdsd {

// A copy begins where a look-up finds the text's end. While it is no longer than what a look-up sees, it moves to the
// latest place that a look-up finds. Once it is longer it stays, as other places only look the same to a look-up. Where
// it breaks, one replaced token is skipped at once (see CopyTracker). After several replaced tokens it is rejoined, at
// a token that equals one of the next few of the source:
//
//   source  a b c d e f g h i j
//   text    a b c d e f X Y h      i is expected
//
// A function of the text alone: of every token and the look-up at it, in order.
class NgramCopy {
 public:
  // The text's token before `end` was read. `at(i)`: token i of the text; `match`: the look-up of text[0, end), of at
  // most max_n tokens.
  template <typename At>
  void Read(const At& at, int64_t end, NgramMatch match, int32_t max_n) {
    const int32_t min_length = max_n + 1;
    if (!Follow(at, end, min_length)) Rejoin(at, end, match);
    if (match.length == 0) return;
    if (source_ > 0) {
      // After a replaced token, the next one shows whether this is still a copy.
      if (tracker_.recent() == 0) return;
      if (tracker_.length() >= min_length && !tracker_.IsBeatenBy(match.length)) return;
    }
    source_ = match.end;
    tracker_.Begin(match.length);
  }

  // What to go on with: the copy, or where it does not know, the look-up of the same end of the text.
  NgramMatch Choose(NgramMatch match) const {
    const bool is_chosen = source_ > 0 && tracker_.is_trusted() && !tracker_.IsBeatenBy(match.length);
    return is_chosen ? NgramMatch{tracker_.length(), source_, tracker_.recent()} : match;
  }

  // Where the expected token is; 0 = the text's end is no copy.
  int32_t source() const { return source_; }

  // So many tokens before source() are also the text's last ones.
  int32_t recent() const { return source_ > 0 ? tracker_.recent() : 0; }

 private:
  // Go one token further. Returns whether the copy breaks at this token.
  template <typename At>
  bool Follow(const At& at, int64_t end, int32_t min_length) {
    if (source_ == 0) return false;
    const bool agrees = at(source_) == at(end - 1);
    const bool goes_on = tracker_.Follow(agrees, min_length);
    const bool breaks = goes_on && !agrees;
    if (breaks) {
      broken_at_ = source_;
      broken_length_ = tracker_.length();
      num_changed_ = 0;
    }
    source_ = goes_on ? source_ + 1 : 0;
    return breaks;
  }

  // After a token at which a copy broke: see whether that copy goes on with this token, unless more than a token or two
  // agree elsewhere.
  template <typename At>
  void Rejoin(const At& at, int64_t end, NgramMatch match) {
    if (broken_length_ == 0) return;
    if (++num_changed_ > kMaxChanged) {
      broken_length_ = 0;
      return;
    }
    const bool is_doubtful = source_ == 0 || (tracker_.recent() > 0 && tracker_.length() <= kMaxDoubtful);
    if (!is_doubtful || match.length > kMaxDoubtful) return;
    const int64_t last = std::min<int64_t>(broken_at_ + kMaxChanged, end - 1);
    for (int32_t i = broken_at_; i < last; ++i) {
      if (at(i) != at(end - 1)) continue;
      source_ = i + 1;
      tracker_.Rejoin(broken_length_);
      broken_length_ = 0;
      return;
    }
  }

  // So many tokens of the source at most are left out where a copy is rejoined, and so many come in their place.
  static constexpr int32_t kMaxChanged = 4;
  static constexpr int32_t kMaxDoubtful = 2;

  int32_t source_ = 0;
  int32_t broken_at_ = 0;      // what was expected where a copy broke last
  int32_t broken_length_ = 0;  // what of it agreed; 0 = there is none to be rejoined
  int32_t num_changed_ = 0;    // tokens after the one at which it broke
  CopyTracker tracker_;
};

}  // namespace fdsd
