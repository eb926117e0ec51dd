#pragma once
// Reads what several sources offer for the rows of a step, and the certain drafts before. Knows no policy.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft_evidence.h"
#include "fdsd/controller.h"
#include "fdsd/draft.h"

namespace fdsd {

// The source of a chain that is a prefix and nothing after it.
constexpr int32_t kPrefixOnly = -1;

struct DraftPrefix {
  const int32_t* token_ids = nullptr;
  const int8_t* sources = nullptr;
  int32_t count = 0;

  DraftPrefix(const ControllerRowsParams& x, int32_t r) {
    if (x.cu_num_prefix == nullptr) return;
    token_ids = x.prefix_token_ids + x.cu_num_prefix[r];
    sources = x.prefix_sources + x.cu_num_prefix[r];
    count = x.cu_num_prefix[r + 1] - x.cu_num_prefix[r];
  }

  static Error Check(const ControllerRowsParams& x) {
    if (x.cu_num_prefix == nullptr) return nullptr;
    if (x.cu_num_prefix[0] != 0) return "cu_num_prefix: expected to start at 0, got another";
    for (int32_t r = 0; r < x.num_rows; ++r)
      if (x.cu_num_prefix[r + 1] < x.cu_num_prefix[r]) return "cu_num_prefix: expected rising offsets, got a decrease";
    return nullptr;
  }
};

constexpr int32_t kMaxSources = 8;

// What a source offers for a row.
struct Offered {
  const int32_t* token_ids;
  const float* draft_prob;
  const int32_t* parents;  // nullptr = a chain
  const int32_t* evidence;
  int32_t count;
};

// The offers of a step.
class OfferPlanes {
 public:
  OfferPlanes(const ControllerOffersParams& p, int32_t num_rows, int32_t num_sources) : p_(p) {
    for (int32_t s = 0; s < num_sources; ++s) {
      const int32_t* cu = p.cu_num_draft + static_cast<int64_t>(s) * (p.max_num_rows + 1);
      if (cu[num_rows] > 0) offering_[static_cast<size_t>(num_offering_++)] = s;
    }
  }

  // Of row r.
  Offered at(int32_t r, int32_t source) const {
    const int64_t plane = source;
    const int32_t* cu = p_.cu_num_draft + plane * (p_.max_num_rows + 1) + r;
    const int64_t first = plane * p_.max_num_drafts + cu[0];
    return {p_.token_ids + first, p_.draft_prob + first, p_.parents == nullptr ? nullptr : p_.parents + first,
            p_.evidence + (plane * p_.max_num_rows + r) * DraftEvidence::kNumFields, cu[1] - cu[0]};
  }

  // The sources that offer anything for any row: offering(0) < offering(1) < ..
  int32_t num_offering() const { return num_offering_; }
  int32_t offering(int32_t i) const { return offering_[static_cast<size_t>(i)]; }

 private:
  const ControllerOffersParams& p_;
  std::array<int32_t, kMaxSources> offering_;
  int32_t num_offering_ = 0;
};

// How an offer agrees with the other sources', draft by draft.
class Agreement {
 public:
  Agreement(const OfferPlanes& planes, int32_t r, int32_t source)
      : own_(planes.at(r, source).token_ids), num_others_(planes.num_offering()) {
    for (int32_t i = 0; i < num_others_; ++i) {
      const Offered other = planes.at(r, planes.offering(i));
      others_[static_cast<size_t>(i)] = {other.token_ids, planes.offering(i) == source ? 0 : other.count};
    }
  }

  // Of draft i; to be called for 0, 1, .. in order. See DraftFacts. Without branches, as no one foresees them.
  int32_t Next(int32_t i) {
    bool is_same = false;
    for (int32_t o = 0; o < num_others_; ++o) {
      Other& other = others_[static_cast<size_t>(o)];
      const bool has_any = i < other.count;
      const bool agrees = *(has_any ? other.token_ids + i : own_ + i) == own_[i];
      is_same |= has_any & agrees;
      differs_ |= !agrees;
      other.count = agrees ? other.count : 0;  // what follows a difference is about another text
    }
    return is_same ? 1 : 2 * static_cast<int32_t>(differs_);
  }

 private:
  struct Other {
    const int32_t* token_ids;
    int32_t count;
  };

  const int32_t* own_;
  int32_t num_others_;
  std::array<Other, kMaxSources> others_;
  bool differs_ = false;
};

// The drafters that a policy asks itself, each through the function that drafts with it.
class AskedDrafters {
 public:
  // Whether any row may have drafts.
  static bool AllowsDrafts(const ControllerRowsParams& x);

  explicit AskedDrafters(const ControllerCreateParams& p);

  // Have each write its plane of the offers. Skipped drafters (bit s for source s) are not asked. Where no row may have
  // drafts, none is asked. They read what they missed when they are asked next. If one refuses, those before it have
  // read the rows, which does no harm.
  Error Ask(const ControllerRowsParams& x, uint64_t skipped, const ControllerOffersParams& to) const;

  // How many drafts they wrote for all rows.
  int32_t CountOffered(const ControllerRowsParams& x, const ControllerOffersParams& offers) const;

  // Whether a source's offers are a drafter's; else the caller writes them.
  bool asks(int32_t source) const { return drafters_[static_cast<size_t>(source)].drafter != nullptr; }

  // Check the planes of all sources.
  Error CheckOffers(const ControllerRowsParams& x, const ControllerOffersParams& offers) const;

 private:
  using Propose = Error (*)(const DraftProposeParams*);
  struct Drafter {
    void* drafter;  // nullptr = the source's offers are written by the caller
    Propose propose;
  };

  std::vector<Drafter> drafters_;  // by source
};

}  // namespace fdsd
