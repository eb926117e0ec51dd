#pragma once
// A text that an output is expected to repeat, and where its n-grams occur. Knows no output.
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

}  // namespace fdsd
