#pragma once
// How a copy of earlier text has been going, token by token, and whether it goes on after a replaced token. Knows
// neither where the copy reads nor how that place was found.
#include <algorithm>
#include <cstdint>

namespace fdsd {

// Text that is repeated with changes (an edited file, a corrected quotation) has a replaced token, after which the copy
// goes on. A look-up of the text's end then finds nothing for some steps, but the copy still knows the next token. A
// request's earlier changes show whether its texts change in this way. The score rises with each change after which the
// copy went on, and falls with each that ended it.
//
//   source  a b c d e f g h i j
//   text    a b c d e f X          length 6, recent 0: h is expected if the score is above 0, else nothing
//   text    a b c d e f X h        length 7, recent 1: i is expected
//   text    a b c d e f X Y        the copy ended: one replaced token, not two
class CopyTracker {
 public:
  // Start a copy whose last `length` tokens agree. The score is kept.
  void Begin(int32_t length) { length_ = recent_ = length; }

  // Go on with a copy that had ended with `length` tokens agreed, as the newest token agrees with it again.
  void Rejoin(int32_t length) {
    length_ = length + 1;
    recent_ = 1;
  }

  // The next token was read; `agrees`: it is what the copy expected. Returns whether the copy goes on; one of fewer
  // than `min_length` tokens ends at its first replaced token.
  bool Follow(bool agrees, int32_t min_length) {
    if (recent_ == 0) score_ = std::clamp(score_ + (agrees ? 1 : -1), -kMaxScore, kMaxScore);
    if (!agrees && (recent_ == 0 || length_ < min_length)) return false;
    length_ += agrees ? 1 : 0;
    recent_ = agrees ? recent_ + 1 : 0;
    return true;
  }

  // Whether to expect that the copy goes on.
  bool is_trusted() const { return recent_ > 0 || score_ > 0; }

  // Whether a look-up that matched so many tokens elsewhere tells more about what comes next.
  bool IsBeatenBy(int32_t match_length) const { return match_length > recent_ + 1; }

  // Tokens that agreed, at least 1.
  int32_t length() const { return length_; }
  // Of them, those after the last changed token; 0 = that was the newest.
  int32_t recent() const { return recent_; }

 private:
  // The score begins at 1, so that the first change counts as a replaced token. Its bound lets the last few decide.
  static constexpr int32_t kMaxScore = 4;

  int32_t length_ = 0;
  int32_t recent_ = 0;
  int32_t score_ = 1;
};

}  // namespace fdsd
