#pragma once
// Ops that ranks run together: each calls them in the same order, with the same sizes.
#include "fdsd/communicator.h"
#include "fdsd/status.h"

namespace fdsd {

// y = the sum of the ranks' x (+ bias) (+ shared), rounded once. The ranks' values are added in float32 as a binary
// tree, r0 + r1 or (r0 + r1) + (r2 + r3), which goes on where `Linear` and `MoeFfn` added slices.
struct AllReduceParams {
  int32_t communicator;  // handle; 0 = one rank alone
  int32_t num_rows;      // T
  int32_t num_columns;   // H
  DType y_dtype;         // of y and shared
  const float* x;        // [T, H]
  const float* bias;     // [H], may be nullptr
  const void* shared;    // [T, H], may be nullptr
  void* y;               // [T, H]
};
Error AllReduce(const AllReduceParams& p);

// The ranks' columns side by side. Rank r of n gives the r-th range of 0..N halved again and again at multiples of
// `unit`, as slices of a sum are cut (see linear.h).
struct AllGatherParams {
  int32_t communicator;  // handle; 0 = one rank alone
  int32_t num_rows;      // T
  int32_t num_own;       // columns of x: as many as the rank's range has
  int32_t num_columns;   // N
  int32_t unit;
  DType dtype;    // of x and y
  const void* x;  // [T, num_own]
  void* y;        // [T, N]
};
Error AllGather(const AllGatherParams& p);

}  // namespace fdsd
