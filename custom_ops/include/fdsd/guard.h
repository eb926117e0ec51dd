#pragma once
// What the calls of the guard look like: whether drafting pays.
#include "fdsd/status.h"

namespace fdsd {

class GainGuard;

struct GuardCreateParams {
  GainGuard** guard;  // [1], to be destroyed with fdsd_guard_destroy
};

// A step is over; see GainGuard::Step.
struct GuardObserveParams {
  GainGuard* guard;
  int32_t num_requests;  // >= 0, and > 0 where num_tokens is
  int32_t num_tokens;    // >= 0
  int32_t num_drafts;    // >= 0
  double seconds;        // > 0 where num_tokens is
  double asking_s;
  double stretch;
};

// What the guard says of steps of so many requests; see GainGuard.
struct GuardFacts {
  double least_gain;
  double gain;              // of the class of the latest step
  int32_t is_off;           // 0 or 1
  int32_t is_worth_asking;  // likewise
};

struct GuardFactsParams {
  const GainGuard* guard;
  int32_t num_requests;  // >= 0
  GuardFacts* facts;     // [1]
};

}  // namespace fdsd
