#pragma once
// Ranks of one node, each with a GPU, that read one another's values: every rank reads the others' buffers itself.
#include "device.h"
#include "fdsd/communicator.h"
#include "group_flags.h"

namespace fdsd::cuda {

// What a rank tells the others, in memory of its GPU. Zeros at first. An *epoch* is attempt << 32 | exchanges of it, so
// ranks that stopped at different exchanges of an attempt are in step again with the next one.
struct RankSignals {
  uint64_t arrived[kMaxRanks];  // by rank: the epoch it has come to; each writes its own word on every GPU
  uint64_t epoch;               // of the rank that owns the memory
  uint64_t failed_in;           // the last attempt in which it gave up waiting, plus 1
};
constexpr int64_t kSignalsBytes = 256;
static_assert(sizeof(RankSignals) <= kSignalsBytes);

// What a GPU tells its host, in pinned memory. A kernel cannot refuse: a rank that waits in vain says so here, and the
// pass goes on with wrong values and waits for no rank. The host checks this when it has waited for the pass, before it
// uses a result.
struct RankStatus {
  uint64_t failed_in;  // the last attempt that did so, plus 1; 0 = none
  uint64_t missing;    // a rank that it waited for
};

// One rank's end. Addresses are those that its GPU has for the memory: other processes' come from cudaIpcOpenMemHandle.
struct RankGroup {
  int32_t rank;
  int32_t size;                     // 2 or 4
  int64_t buffer_bytes;             // that one exchange carries; a rank has two buffers, one after the other
  uint64_t timeout_ns;              // that a rank waits for another
  char* buffers[kMaxRanks];         // of every rank
  RankSignals* signals[kMaxRanks];  // likewise
  const GroupFlags* flags;          // the host's, which end every wait
  RankStatus* status;
};

// The group of a handle; nullptr where none is open.
const RankGroup* FindRankGroup(int32_t handle);

// Count the rank's exchange, tell the other ranks, and wait until all have come as far. The others' launches after this
// one then see what the rank wrote to its buffer before. Only this launch waits for other GPUs. Launches of the
// emulation never wait: the host does the same when the stream comes to it.
Error MeetRanks(const RankGroup& group, Stream stream);

// Begin an attempt, whose number is higher than the last one's, before its exchanges; waits for no rank.
Error BeginAttempt(const RankGroup& group, int64_t attempt, Stream stream);

// The buffer that a rank's exchange of this epoch uses. Two are enough: a rank that has come to an exchange has read
// everything of the one before the last. An attempt begins when all GPUs have done the one before, or a rank has failed
// in it and uses nothing that it reads.
__host__ __device__ constexpr int64_t BufferOffset(uint64_t epoch, int64_t buffer_bytes) {
  return static_cast<int64_t>(epoch % 2) * buffer_bytes;
}

}  // namespace fdsd::cuda
