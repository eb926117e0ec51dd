#pragma once
// A text that an output is expected to repeat, where its n-grams occur, and where the output is in it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fdsd {

// Built once, in time and memory proportional to the text; a look-up takes the logarithm of how often the n-gram
// occurs.
class PredictedText {
 public:
  static constexpr int32_t kGram = 4;

  PredictedText() = default;
  // `multiplier` is odd; results do not depend on it.
  PredictedText(const int32_t* tokens, int32_t count, uint64_t multiplier);

  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t operator[](int32_t i) const { return tokens_[static_cast<size_t>(i)]; }

  // Where gram[0, kGram) ends: at the first place at or after `home`, else at the last one before it. 0 = it does not
  // occur.
  int32_t FindEnd(const int32_t* gram, int32_t home) const;

  int64_t num_bytes() const;

 private:
  // The cell that holds the n-gram, or the empty one where it belongs. `ends[g]`: where one of group g ends.
  size_t CellOf(const int32_t* gram, const std::vector<int32_t>& ends) const;

  uint64_t multiplier_ = 1;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> cells_;   // group of equal n-grams + 1, 0 = empty; a power of two, at most half in use
  std::vector<int32_t> begins_;  // group g ends at ends_[begins_[g], begins_[g + 1])
  std::vector<int32_t> ends_;    // rising in each group
  std::vector<int32_t> first_;   // the first end of each group
};

// Where in a predicted text an output is.
//
// Follows the text token by token. At a token that differs it looks for a place to go on from, among those that end
// with the output's last tokens:
//
//   text    a b c d e f g h        c was replaced: c's place is `home`, d is expected after X, on trial
//   output  a b X                  c d were left out: e is found after home
//           a b e                  X Y were put in: lost after Y, and c is found again at home
//           a b X Y c
//
// Of the next kWindow places from home on, the one with the longest match of the output's end decides; of equals, the
// nearest. A match of a single token counts among the next kNear places only. Where no match has two tokens, the last
// four tokens are looked up in the whole text: a part was moved, or left out. Home stays until kTrusted tokens have
// agreed since. So a place that only looked right costs no more than the drafts from there.
//
// A function of the output alone. Reading a token takes a constant time, but for a look-up's logarithm.
//
// Source: drafting from a reference by matching the output's last tokens is that of LLMA, arXiv:2304.04487.
class PredictionFollower {
 public:
  static constexpr int32_t kWindow = 64, kNear = 8, kTrusted = 4, kLongest = 8;

  // The output's token `end - 1` was read, the output beginning at `begin`. `at(i)`: token i.
  template <typename At>
  void Read(const PredictedText& text, const At& at, int64_t begin, int64_t end) {
    if (next_ >= 0 && next_ < text.size() && text[next_] == at(end - 1)) {
      ++next_;
      ++matched_;
      ++recent_;
      if (is_trusted_ || recent_ >= kTrusted) {
        home_ = next_;
        is_trusted_ = true;
        num_changed_ = 0;
      }
      return;
    }
    is_trusted_ = false;
    ++num_changed_;
    matched_ /= 2;
    Find(text, at, begin, end);
  }

  // What is expected next; -1 = not known, or the text has ended.
  int32_t next(const PredictedText& text) const { return next_ < text.size() ? next_ : -1; }

  // Tokens that agreed: those before a change count half, those before a part that was moved count nothing. recent():
  // of them, those after the last change.
  int32_t matched() const { return matched_; }
  int32_t recent() const { return recent_; }

  // Drafts that the place is good for.
  int32_t MaxDrafts(int32_t budget) const { return is_trusted_ ? budget : std::min(budget, 2 * (recent_ + 1)); }

 private:
  template <typename At>
  void Find(const PredictedText& text, const At& at, int64_t begin, int64_t end) {
    const auto longest = static_cast<int32_t>(std::min<int64_t>(kLongest, end - begin));
    int32_t best = 0, place = -1;
    for (int32_t e = home_ + 1; e <= std::min(home_ + kWindow, text.size()); ++e) {
      int32_t length = 0;
      while (length < longest && length < e && text[e - 1 - length] == at(end - 1 - length)) ++length;
      if (length <= best || (length == 1 && e > home_ + kNear)) continue;
      best = length;
      place = e;
    }
    if (best < 2 && end - begin >= PredictedText::kGram) {
      int32_t gram[PredictedText::kGram];
      for (int32_t i = 0; i < PredictedText::kGram; ++i) gram[i] = at(end - PredictedText::kGram + i);
      if (const int32_t found = text.FindEnd(gram, home_); found > 0) {
        best = PredictedText::kGram;
        place = found;
        matched_ = 0;
      }
    }
    if (best == 0 && num_changed_ == 1) place = home_ + 1;  // one token was replaced, perhaps
    next_ = place;
    recent_ = best;
    matched_ = std::max(matched_, best);
  }

  int32_t next_ = 0;
  int32_t home_ = 0;         // what was expected where the text was left last
  int32_t matched_ = 0;      // see matched()
  int32_t recent_ = 0;       // of them, those after the last change
  int32_t num_changed_ = 0;  // tokens since that were not expected
  bool is_trusted_ = false;
};

}  // namespace fdsd
