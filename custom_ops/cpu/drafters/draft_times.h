#pragma once
// What a step takes, by how many drafts are in it. Knows no drafts.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fdsd/controller.h"

namespace fdsd {

class DraftTimes {
 public:
  // At most `most` drafts. Requires 0 <= num_step_rows < num_times.
  DraftTimes(const ControllerTimesParams& p, int64_t most)
      : curve_(p.curve + p.num_step_rows),
        fixed_(p.fixed),
        per_draft_(p.per_draft),
        any_draft_(p.any_draft),
        most_(static_cast<int32_t>(std::min<int64_t>(most, p.num_times - 1 - p.num_step_rows))) {}

  Error Check() const {
    bool is_rising = true;
    for (int32_t d = 0; d < most_; ++d) is_rising &= curve_[d + 1] >= curve_[d];
    // Of rising numbers the first and the last are the least and the most.
    if (is_rising && per_draft_ >= 0 && any_draft_ >= 0 && (*this)[0] > 0 && std::isfinite((*this)[most_]))
      return nullptr;
    return "times: expected finite rising numbers > 0, got others";
  }

  // Of d drafts, 0 <= d <= most().
  double operator[](int32_t d) const { return curve_[d] + fixed_ + d * per_draft_ + (d > 0 ? any_draft_ : 0.0); }

  // Drafts that the step can have at most.
  int32_t most() const { return most_; }

 private:
  const double* curve_;
  double fixed_;
  double per_draft_;
  double any_draft_;
  int32_t most_;
};

}  // namespace fdsd
