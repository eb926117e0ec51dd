#pragma once
// What a method that drafts from texts knows of its draft, from which it is estimated how much will be accepted.
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

}  // namespace fdsd
