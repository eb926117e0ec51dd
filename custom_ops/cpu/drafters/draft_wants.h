#pragma once
// Whether a source that takes time to be asked is worth it in a step, for which rows, and how far. Knows no drafting
// rule.
#include "draft_policy.h"

namespace fdsd {

// What the other sources offer is known, from DraftPolicy::Offer. The source's own drafts are not: of each it is
// assumed that it is right as often as the request's latest ones were. With these assumed chains the step is filled as
// it would be, once for every number of drafts per row, the time of the call being part of the step's:
//
//   rate(k) = expected tokens / (time of the step + time of a call for k drafts of the rows that take them)
//
// The best k is wanted if its rate is above that of a step without the call.
Error DraftWants(const DraftPolicy& policy, const ControllerWantsParams& p);

}  // namespace fdsd
