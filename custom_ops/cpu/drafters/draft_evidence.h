#pragma once
// What methods that draft from texts know of a draft: the evidence for its acceptance, and its longest length.
#include <algorithm>
#include <cstdint>

namespace fdsd {

// Of a row's draft. Each token of it has a probability besides: how often it followed here, over one more than how
// often anything did, so that 1 of 1 tells less than 9 of 9. A method that does not count says 0.5.
struct DraftEvidence {
  int32_t matched = 0;  // tokens of the text's end that agreed
  int32_t recent = 0;   // of them, those after the last replaced token; `matched` where none was replaced
  int32_t origin = 0;   // 0 = the request's own text, 1 = other requests' outputs

  static constexpr int32_t kNumFields = 3;
  static constexpr float kNotCounted = 0.5F;

  // `to`: [kNumFields], nullptr = unwanted.
  void Write(int32_t* to) const {
    if (to != nullptr) std::copy_n(&matched, kNumFields, to);
  }
};

// At most `max_factor` drafts per matched token, and at most `budget`.
inline int32_t MaxDrafts(double max_factor, int32_t match_length, int32_t budget) {
  // A product that should be whole may come out a little below.
  constexpr double kRounding = 1e-9;
  return static_cast<int32_t>(std::min<double>(budget, match_length * max_factor + kRounding));
}

}  // namespace fdsd
