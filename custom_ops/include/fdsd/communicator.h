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

// Give `num_bytes` bytes to every rank and receive theirs, in order of the ranks. Returns 0, or another number if that
// failed or took too long.
using ExchangeFunction = int32_t (*)(const void* mine, int64_t num_bytes, void* all);

// Over a function that exchanges equally many bytes with every rank.
struct CallbackCommunicatorParams {
  const void* exchange;  // an ExchangeFunction
  int32_t rank;
  int32_t size;           // 2 or 4
  int32_t* communicator;  // [1] receives the handle
};

}  // namespace fdsd
