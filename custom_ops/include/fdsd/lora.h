#pragma once
#include "fdsd/linear.h"

namespace fdsd {

// Low-rank adapters of a linear layer, each in a slot: y += scale * (x . A^T) . B^T, of a row the adapter in its slot.
// A layer may be of several parts along N (q, k and v), each with matrices of its own. A part that an adapter leaves as
// it is has rank 0. A row's bits depend on that row alone. Source: arXiv:2106.09685.

// u = x . A^T. Each slice of the sum over K is summed in float32, then the slices in their tree. Rows without an
// adapter and elements beyond the adapter's rank become zeros.
struct LoraShrinkParams {
  int32_t num_rows;     // T
  int32_t in_features;  // K
  int32_t num_slots;    // S
  int32_t num_parts;    // P
  int32_t max_rank;     // R
  SliceRule slices;
  DType dtype;           // of x and a
  const void* x;         // [T, K]
  const int32_t* slots;  // [T], -1 = no adapter
  const int32_t* ranks;  // [S, P], at most R
  const void* a;         // [S, P, R, K]
  float* u;              // [T, P, R]
};
Error LoraShrink(const LoraShrinkParams& p);

// y = round(y + scale * u . B^T), in place. The sum over the rank is in float32 and in order. Rows without an adapter
// are not touched.
struct LoraExpandParams {
  int32_t num_rows;          // T
  int32_t out_features;      // N
  int32_t num_slots;         // S
  int32_t num_parts;         // P
  int32_t max_rank;          // R
  DType dtype;               // of y and b
  const float* u;            // [T, P, R]
  const int32_t* slots;      // [T], -1 = no adapter
  const int32_t* ranks;      // [S, P], at most R
  const float* scales;       // [S, P]
  const int32_t* part_ends;  // [P] columns at which parts end; the last is N
  const void* b;             // [S, R, N]: of a slot, column n of the part that n is in
  void* y;                   // [T, N]
};
Error LoraExpand(const LoraExpandParams& p);

}  // namespace fdsd
