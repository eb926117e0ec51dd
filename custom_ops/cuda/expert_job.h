#pragma once
// A rank's jobs for the experts of all: the launches of a pass that give rows, and that wait for what comes back. See
// expert_gpu.h.
#include "expert_gpu.h"
#include "moe_parts.h"

namespace fdsd::cuda {

// What giving a round takes of the workspace. A place is rank * S + slot.
struct RoundArrays {
  DevicePtr<int32_t> tokens;  // [pairs]
  DevicePtr<int32_t> places;  // [pairs]
  DevicePtr<int32_t> first;   // [num_places + 1]

  RoundArrays(int64_t num_pairs, int32_t num_places, Parts* parts)
      : tokens(parts->Array<int32_t>(num_pairs)),
        places(parts->Array<int32_t>(num_pairs)),
        first(parts->Array<int32_t>(num_places + 1)) {}
};

// Of a round, at most as many as fit.
struct RoundRows {
  int32_t layer;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_rows;
  int64_t row_bytes;
  const char* x;              // [num_rows] rows
  const int32_t* expert_ids;  // [num_rows, top_k]
};

// On the stream: wait until no rank reads the last job any more, choose a place for each row and expert by the table
// as it is then, and publish the job. A wait that fails says so in the status, and what follows on the stream does
// nothing.
Error GiveRound(const ExpertGroup& group, const RoundRows& rows, const RoundArrays& arrays, Stream stream);
// On the stream: wait until all ranks have done the job. Experts that it asked for may move from then on.
Error AwaitExperts(const ExpertGroup& group, Stream stream);

}  // namespace fdsd::cuda
