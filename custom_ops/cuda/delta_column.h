#pragma once
// A column of a head's state in a gated delta net, in the registers of a few threads.
#include "delta_rows.h"

namespace fdsd::cuda {

constexpr int kMaxDim = 128;       // rows and columns of a head's state
constexpr int kColumnThreads = 4;  // neighbouring threads that have a column of the state
constexpr int kQuad = 4;           // neighbouring rows of a column that a thread has
constexpr int kThreadRows = kMaxDim / kColumnThreads;
constexpr int kMaxThreads = kMaxDim * kColumnThreads;

// The thread's rows of a column of the state.
struct DeltaColumn {
  float s[kThreadRows];
  int32_t column;
  int32_t first_row;  // it has kQuad rows from here on, and from each kColumnThreads * kQuad further on

  __device__ int32_t RowOf(int j) const { return j / kQuad * (kColumnThreads * kQuad) + first_row + j % kQuad; }

  // Rows from RowOf(j) to RowOf(j + 1). Addresses follow one another, as there are no registers for all of them.
  static __device__ int32_t StepAfter(int j) { return j % kQuad == kQuad - 1 ? (kColumnThreads - 1) * kQuad + 1 : 1; }

  __device__ void Load(const DeltaShape& shape, DevicePtr<const float> state) {
    DevicePtr<const float> from = state + (int64_t{first_row} * shape.value_dim + column);
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j) {
      s[j] = RowOf(j) < shape.key_dim ? from[0] : 0.0f;
      from = from + StepAfter(j) * shape.value_dim;
    }
  }

  __device__ void Store(const DeltaShape& shape, DevicePtr<float> state) const {
    DevicePtr<float> to = state + (int64_t{first_row} * shape.value_dim + column);
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j) {
      if (RowOf(j) < shape.key_dim) to[0] = s[j];
      to = to + StepAfter(j) * shape.value_dim;
    }
  }

  // S = decay * S; u = beta * (v - S^T k); S = S + k u^T. Returns S^T q.
  __device__ float Step(DevicePtr<const float> q, DevicePtr<const float> k, float v, float decay, float beta,
                        float k_dot_q) {
    float read = 0.0f;
    float out = 0.0f;
#pragma unroll
    for (int j = 0; j < kThreadRows; j += kQuad) {
      const uint4 keys = ViewAs<const uint4>(k + RowOf(j))[0];
      const uint4 queries = ViewAs<const uint4>(q + RowOf(j))[0];
      read = fmaf(s[j], __uint_as_float(keys.x), read);
      read = fmaf(s[j + 1], __uint_as_float(keys.y), read);
      read = fmaf(s[j + 2], __uint_as_float(keys.z), read);
      read = fmaf(s[j + 3], __uint_as_float(keys.w), read);
      out = fmaf(s[j], __uint_as_float(queries.x), out);
      out = fmaf(s[j + 1], __uint_as_float(queries.y), out);
      out = fmaf(s[j + 2], __uint_as_float(queries.z), out);
      out = fmaf(s[j + 3], __uint_as_float(queries.w), out);
    }
#pragma unroll
    for (int lanes = 1; lanes < kColumnThreads; lanes *= 2) {
      read += __shfl_xor_sync(kAllLanes, read, lanes);
      out += __shfl_xor_sync(kAllLanes, out, lanes);
    }
    const float update = beta * (v - decay * read);
#pragma unroll
    for (int j = 0; j < kThreadRows; j += kQuad) {
      const uint4 keys = ViewAs<const uint4>(k + RowOf(j))[0];
      s[j] = fmaf(__uint_as_float(keys.x), update, decay * s[j]);
      s[j + 1] = fmaf(__uint_as_float(keys.y), update, decay * s[j + 1]);
      s[j + 2] = fmaf(__uint_as_float(keys.z), update, decay * s[j + 2]);
      s[j + 3] = fmaf(__uint_as_float(keys.w), update, decay * s[j + 3]);
    }
    return fmaf(k_dot_q, update, decay * out);
  }
};

}  // namespace fdsd::cuda
