#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Tells another thread how far a pass has come: adds 1 to the counter, after which everything the pass wrote before is
// visible to who reads it, and wakes that thread.
struct SignalParams {
  int32_t num_tokens;        // T
  int32_t event_fd;          // eventfd to which 1 is added; -1 = none
  const int32_t* positions;  // [T] of the pass; not read
  int64_t* counter;          // [1]
};
Error Signal(const SignalParams& p);

}  // namespace fdsd
