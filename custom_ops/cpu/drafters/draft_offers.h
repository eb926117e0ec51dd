#pragma once
// Reads what several sources offer for the rows of a step. Knows no policy.
#include <cstdint>

#include "draft_evidence.h"
#include "fdsd/policy.h"

namespace fdsd {

constexpr int32_t kMaxSources = 8;

// Plane `source`, row r of the offers.
struct Offered {
  const int32_t* token_ids = nullptr;
  const float* draft_prob = nullptr;
  const int32_t* evidence = nullptr;
  int32_t count = 0;

  Offered() = default;
  Offered(const PolicyOffersParams& p, int32_t r, int32_t source) {
    const int64_t plane = source;
    const int32_t* cu = p.cu_num_draft + plane * (p.max_num_rows + 1) + r;
    token_ids = p.token_ids + plane * p.max_num_drafts + cu[0];
    draft_prob = p.draft_prob + plane * p.max_num_drafts + cu[0];
    evidence = p.evidence + (plane * p.max_num_rows + r) * DraftEvidence::kNumFields;
    count = cu[1] - cu[0];
  }
};

// How an offer agrees with the other sources', draft by draft.
class Agreement {
 public:
  Agreement(const PolicyOffersParams& p, int32_t r, int32_t source, int32_t num_sources) : own_(p, r, source) {
    for (int32_t s = 0; s < num_sources; ++s) {
      if (s == source) continue;
      const Offered other(p, r, s);
      if (other.count > 0) others_[num_others_++] = other;
    }
  }

  // Of draft i; to be called for 0, 1, .. in order.
  int32_t Next(int32_t i) {
    int32_t agreement = 0;
    for (int32_t o = 0; o < num_others_; ++o) {
      Offered& other = others_[o];
      const bool ends = i >= other.count;
      if (ends && other.token_ids != nullptr) continue;
      if (!ends && other.token_ids != nullptr && other.token_ids[i] == own_.token_ids[i]) {
        agreement = 1;
      } else {
        other.token_ids = nullptr;  // what follows a difference is about another text
        agreement = agreement == 1 ? 1 : 2;
      }
    }
    return agreement;
  }

 private:
  Offered own_;
  Offered others_[kMaxSources] = {};
  int32_t num_others_ = 0;
};

}  // namespace fdsd
