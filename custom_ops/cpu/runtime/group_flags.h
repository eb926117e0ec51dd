#pragma once
#include <cstdint>

#include "fdsd/communicator.h"

namespace fdsd {

// What ends the exchanges of ranks that share memory. It begins a page, so that GPUs that wait for one another can look
// at it too.
struct GroupFlags {
  uint64_t is_aborted;            // not 0: all exchanges fail, for ever
  uint64_t failed_in[kMaxRanks];  // by rank: the last attempt that failed there, plus 1
};

}  // namespace fdsd
