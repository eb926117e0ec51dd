#pragma once
// How a copy of earlier text has been going, one token after another, and whether it goes on behind a token that was
// replaced. Knows neither where the copy reads nor how that place was found.
#include <algorithm>
#include <cstdint>

namespace fdsd {

// Whoever repeats text with changes (an edited file, a corrected quotation) replaces a token and goes on behind it. A
// look-up of the text's end finds nothing there for some steps: the copy itself still knows what comes next. Whether
// the texts of a request are changed in this way is seen from its own earlier changes: each that the copy goes on
// behind earns credit, each that it does not costs some.
//
//   source  a b c d e f g h i j
//   text    a b c d e f X          length 6, recent 0: h is expected if there is credit, else nothing
//   text    a b c d e f X h        length 7, recent 1: i is expected
//   text    a b c d e f X Y        the copy ended: one replaced token, not two
class CopyTrail {
 public:
  // Start a copy whose last `length` tokens agree. Credit is kept.
  void Begin(int32_t length) { length_ = recent_ = length; }

  // Go on with a copy that had ended with `length` tokens agreed, as the newest token agrees with it again.
  void Rejoin(int32_t length) {
    length_ = length + 1;
    recent_ = 1;
  }

  // The next token was read; `agrees`: it is what the copy expected. Returns whether the copy goes on; one of fewer
  // than `min_length` tokens ends at its first replaced token.
  bool Follow(bool agrees, int32_t min_length) {
    if (recent_ == 0) credit_ = std::clamp(credit_ + (agrees ? 1 : -1), -kMaxCredit, kMaxCredit);
    if (!agrees && (recent_ == 0 || length_ < min_length)) return false;
    length_ += agrees ? 1 : 0;
    recent_ = agrees ? recent_ + 1 : 0;
    return true;
  }

  // Whether to expect that the copy goes on.
  bool is_trusted() const { return recent_ > 0 || credit_ > 0; }

  // Whether a look-up that matched so many tokens elsewhere tells more about what comes next.
  bool IsBeatenBy(int32_t match_length) const { return match_length > recent_ + 1; }

  // Tokens that agreed, at least 1.
  int32_t length() const { return length_; }
  // Of them, those behind the last changed token; 0 = that was the newest.
  int32_t recent() const { return recent_; }

 private:
  // The first change is taken for a replaced token; later ones as most of the last few were.
  static constexpr int32_t kMaxCredit = 4;

  int32_t length_ = 0;
  int32_t recent_ = 0;
  int32_t credit_ = 1;
};

}  // namespace fdsd
