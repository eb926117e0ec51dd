#pragma once
// The drafters that a policy asks itself, each through the function that drafts with it. Knows none by name.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fdsd/controller.h"
#include "fdsd/draft.h"

namespace fdsd {

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
