#pragma once
// How ranks that compute one model together exchange bytes, as it is opened; see cpu/runtime/communicator.h.
#include "fdsd/status.h"

namespace fdsd {

constexpr int32_t kMaxRanks = 4;

// Over memory that processes of one host share.
struct SharedCommunicatorParams {
  int32_t file;  // descriptor of the segment, zeros at first; may be closed afterwards
  int32_t rank;
  int32_t size;           // 2 or 4
  double timeout_s;       // how long an exchange waits for another rank
  int32_t* communicator;  // [1] receives the handle
};

// Give `num_bytes` bytes to every node and receive theirs, in order of the nodes. Returns 0, or another number if that
// failed or took too long.
using ExchangeFunction = int32_t (*)(const void* mine, int64_t num_bytes, void* all);

// Over a function that exchanges equally many bytes with every node: a host, or whatever holds equally many ranks that
// follow each other. Ranks of one node reach each other through a communicator of their own; the first of them calls
// the function.
struct CallbackCommunicatorParams {
  const void* exchange;  // an ExchangeFunction; nullptr where the rank is not the first of its node
  int32_t local;         // handle of the node's communicator, open for longer than this one; 0 = one rank per node
  int32_t rank;
  int32_t size;           // 2 or 4
  int32_t* communicator;  // [1] receives the handle
};

}  // namespace fdsd
