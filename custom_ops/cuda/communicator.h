#pragma once
// Ranks of one node, each with a GPU, that add into one another's sums: every rank reads the others' buffers itself.
#include "device.h"
#include "fdsd/communicator.h"

namespace fdsd::cuda {

// What a rank tells the others, in memory of its GPU. Zeros at first.
struct RankSignals {
  uint32_t arrived[kMaxRanks];  // by rank: the exchange it has come to; each writes its own word on every GPU
  uint32_t epoch;               // exchanges of the rank that owns the memory
  uint32_t has_failed;          // 1 = a rank did not come in time; sums since then are wrong, see below
};

// A kernel cannot refuse: who waits for a rank in vain sets its own has_failed, and the step goes on with wrong sums.
// Whoever runs steps on several GPUs copies it back with each step's results and ends where it is set, before any of
// them is used. No server does so yet.

// One rank's end. Addresses are those that its GPU has for the memory: other processes' come from cudaIpcOpenMemHandle.
struct RankGroup {
  int32_t rank;
  int32_t size;                     // 2 or 4
  int64_t buffer_bytes;             // that one exchange carries; a rank has two buffers, one behind the other
  char* buffers[kMaxRanks];         // of every rank
  RankSignals* signals[kMaxRanks];  // likewise
};

// The group of a handle; nullptr where none is open.
const RankGroup* FindRankGroup(int32_t handle);

// Count the rank's exchange, tell the other ranks, wait until all have come as far. What a rank wrote to its buffer
// before is then seen by the others' launches behind this one. It is the one launch that waits for other GPUs; the
// emulation, whose launches wait for nobody, does the same on the host, in the caller's thread.
Error MeetRanks(const RankGroup& group, Stream stream);

// The buffer that a rank's exchange number `epoch` uses. Two are enough: who has come to an exchange has read
// everything of the one before the last.
__host__ __device__ constexpr int64_t BufferOffset(uint32_t epoch, int64_t buffer_bytes) {
  return static_cast<int64_t>(epoch % 2) * buffer_bytes;
}

}  // namespace fdsd::cuda
