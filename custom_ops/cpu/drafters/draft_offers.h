#pragma once
// Reads what several sources offer for the rows of a step. Knows no policy.
#include <array>
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

// What all sources offer for a row.
class RowOffers {
 public:
  RowOffers(const PolicyOffersParams& p, int32_t r, int32_t num_sources) : num_sources_(num_sources) {
    for (int32_t s = 0; s < num_sources; ++s) offers_[static_cast<size_t>(s)] = Offered(p, r, s);
  }

  const Offered& operator[](int32_t source) const { return offers_[static_cast<size_t>(source)]; }
  int32_t num_sources() const { return num_sources_; }

 private:
  std::array<Offered, kMaxSources> offers_;
  int32_t num_sources_;
};

// How an offer agrees with the other sources', draft by draft.
class Agreement {
 public:
  Agreement(const RowOffers& offers, int32_t source) : offers_(offers), own_(offers[source].token_ids) {
    for (int32_t s = 0; s < offers.num_sources(); ++s)
      if (s != source && offers[s].count > 0) agreeing_ |= 1U << s;
  }

  // Of draft i; to be called for 0, 1, .. in order. See DraftFacts.
  int32_t Next(int32_t i) {
    bool is_same = false;
    for (uint32_t left = agreeing_; left != 0; left &= left - 1) {
      const int32_t s = __builtin_ctz(left);
      const Offered& other = offers_[s];
      if (i >= other.count) continue;
      if (other.token_ids[i] == own_[i]) {
        is_same = true;
      } else {
        agreeing_ &= ~(1U << s);  // what follows a difference is about another text
        differs_ = true;
      }
    }
    return is_same ? 1 : differs_ ? 2 : 0;
  }

 private:
  const RowOffers& offers_;
  const int32_t* own_;
  uint32_t agreeing_ = 0;  // bit s: source s has offered the same so far
  bool differs_ = false;
};

}  // namespace fdsd
