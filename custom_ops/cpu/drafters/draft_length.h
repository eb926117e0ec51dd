#pragma once
// How many tokens a match is good for. Shared by the methods that draft from texts.
#include <algorithm>
#include <cstdint>

namespace fdsd {

// At most `max_factor` drafts per matched token, and at most `budget`.
inline int32_t MaxDrafts(double max_factor, int32_t match_length, int32_t budget) {
  // A product that should be whole may come out a little below.
  constexpr double kRounding = 1e-9;
  return static_cast<int32_t>(std::min<double>(budget, match_length * max_factor + kRounding));
}

}  // namespace fdsd
