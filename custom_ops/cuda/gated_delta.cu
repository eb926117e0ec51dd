// Gated delta nets: a block has a value head of a request, its state in registers. Then the rows that later steps need
// are stored, after all blocks that read those of before.
#include "delta_column.h"
#include "delta_rows.h"
#include "fdsd/gated_delta.h"
#include "gated_delta_check.h"
#include "logistic.h"
#include "ops.h"
#include "reduce.h"

namespace fdsd::cuda {
namespace {

constexpr int kChunk = 16;  // rows of a request that lie in shared memory together
constexpr int kStoreThreads = 256;
constexpr float kUnitEps = 1e-6f;

// A chunk's rows in shared memory; those of q and k have zeros after their end.
struct DeltaChunk {
  DevicePtr<float> q;  // [kChunk, kMaxDim]
  DevicePtr<float> k;
  DevicePtr<float> v;
  DevicePtr<float> o;
  DevicePtr<float> scalars;  // [kChunk, 3]: decay, beta, k . q
};

// The warp: silu of the convolution of `count` columns. Returns the thread's part of the sum of squares.
template <typename T>
__device__ float Convolve(const DeltaRows<T>& rows, int32_t row, DevicePtr<const float> conv, int64_t first_column,
                          int32_t count, DevicePtr<float> x) {
  float squares = 0.0f;
  // Not unrolled: registers are full of the state.
#pragma unroll 1
  for (int d = threadIdx.x % kWarpSize; d < kMaxDim; d += kWarpSize) {
    float sum = 0.0f;
    if (d < count) {
#pragma unroll 1
      for (int j = 0; j <= rows.history; ++j)
        sum = fmaf(rows.Raw(row - rows.history + j, first_column + d), conv[j * rows.qkv + first_column + d], sum);
    }
    const float value = Silu()(sum);
    x[d] = value;
    squares = fmaf(value, value, squares);
  }
  return squares;
}

// The warp: what a row does to the state.
template <typename T>
__device__ void PrepareRow(const DeltaShape& shape, const DeltaRows<T>& rows, const DeltaWeightArrays& weights,
                           int32_t row, int32_t head, int32_t i, const DeltaChunk& chunk) {
  const int32_t key_head = head / (shape.num_value_heads / shape.num_key_heads);
  const int64_t q_column = int64_t{key_head} * shape.key_dim;
  const DevicePtr<float> q = chunk.q + i * kMaxDim;
  const DevicePtr<float> k = chunk.k + i * kMaxDim;
  const float q_squares = WarpSum(Convolve(rows, row, weights.conv, q_column, shape.key_dim, q));
  const float k_squares = WarpSum(Convolve(rows, row, weights.conv, shape.keys() + q_column, shape.key_dim, k));
  Convolve(rows, row, weights.conv, 2 * shape.keys() + int64_t{head} * shape.value_dim, shape.value_dim,
           chunk.v + i * kMaxDim);
  const float q_scale = 1.0f / sqrtf(q_squares + kUnitEps) / sqrtf(static_cast<float>(shape.key_dim));
  const float k_scale = 1.0f / sqrtf(k_squares + kUnitEps);
  float dot = 0.0f;
  for (int d = threadIdx.x % kWarpSize; d < kMaxDim; d += kWarpSize) {
    q[d] = q[d] * q_scale;
    k[d] = k[d] * k_scale;
    dot = fmaf(q[d], k[d], dot);
  }
  dot = WarpSum(dot);
  if (threadIdx.x % kWarpSize != 0) return;
  const float a = rows.Gate(row, shape.num_value_heads + head) + weights.dt_bias[head];
  const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
  chunk.scalars[i * 3] = expf(-expf(weights.a_log[head]) * softplus);
  chunk.scalars[i * 3 + 1] = Gated(1.0f, rows.Gate(row, head));
  chunk.scalars[i * 3 + 2] = dot;
}

// The warp: y of a row of the step.
template <typename T>
__device__ void FinishRow(const DeltaShape& shape, const DeltaRows<T>& rows, DevicePtr<const float> norm, int32_t row,
                          int32_t head, DevicePtr<const float> o, DevicePtr<T> y) {
  const int lane = threadIdx.x % kWarpSize;
  float squares = 0.0f;
#pragma unroll 1
  for (int d = lane; d < shape.value_dim; d += kWarpSize) squares = fmaf(o[d], o[d], squares);
  const float scale = 1.0f / sqrtf(WarpSum(squares) / static_cast<float>(shape.value_dim) + shape.eps);
  const int64_t step_row = row - rows.num_replayed;
  const int64_t first_column = int64_t{head} * shape.value_dim;
  const DevicePtr<const T> z = rows.qkvz + (step_row * rows.qkvz_width + rows.qkv + first_column);
  const DevicePtr<T> to = y + ((rows.first + step_row) * shape.values() + first_column);
#pragma unroll 1
  for (int d = lane; d < shape.value_dim; d += kWarpSize)
    to[d] = FromFloat<T>(o[d] * scale * norm[d] * Silu()(LoadFloat<T>(z, d)));
}

// Block (request, head), with kColumnThreads threads for each column of the head.
template <typename T>
__global__ __launch_bounds__(kMaxThreads) void GatedDeltaKernel(DeltaShape shape, DeltaMaps maps,
                                                                DeltaWeightArrays weights, DevicePtr<const T> qkvz,
                                                                DevicePtr<const T> ba, DevicePtr<const T> conv_rows,
                                                                DevicePtr<const T> draft_rows, DevicePtr<float> states,
                                                                DevicePtr<T> y) {
  FDSD_SHARED(float, q, kChunk* kMaxDim);
  FDSD_SHARED(float, k, kChunk* kMaxDim);
  FDSD_SHARED(float, v, kChunk* kMaxDim);
  FDSD_SHARED(float, o, kChunk* kMaxDim);
  FDSD_SHARED(float, scalars, kChunk * 3);
  const DeltaChunk chunk{q, k, v, o, scalars};
  const auto r = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y);
  if (maps.query_start_loc[r] == maps.query_start_loc[r + 1]) return;
  const DeltaRows<T> rows(shape, maps, r, qkvz, ba, conv_rows, draft_rows);
  const auto state_of = [&](int32_t slot) {
    return states + (int64_t{slot} * shape.num_value_heads + head) * shape.key_dim * shape.value_dim;
  };
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize;
  const auto num_warps = static_cast<int32_t>(blockDim.x / kWarpSize);
  DeltaColumn column{{}, thread / kColumnThreads, thread % kColumnThreads * kQuad};
  const bool has_column = column.column < shape.value_dim;
  if (rows.source >= 0 && has_column) column.Load(shape, state_of(rows.source));
  if (rows.num_kept == 0 && rows.source != rows.table_row) {
    const DevicePtr<float> to = state_of(rows.table_row);
#pragma unroll 1
    for (int32_t i = thread; i < shape.key_dim * shape.value_dim; i += static_cast<int32_t>(blockDim.x))
      to[i] = rows.source < 0 ? 0.0f : state_of(rows.source)[i];
  }
  int32_t snapshot = maps.cu_snapshots[r];
  const int32_t last_snapshot = maps.cu_snapshots[r + 1];
  for (int32_t begin = 0; begin < rows.count; begin += kChunk) {
    const int32_t count = rows.count - begin < kChunk ? rows.count - begin : kChunk;
    for (int32_t i = warp; i < count; i += num_warps) PrepareRow<T>(shape, rows, weights, begin + i, head, i, chunk);
    __syncthreads();
    for (int32_t i = 0; i < count; ++i) {
      const float value = has_column ? v[i * kMaxDim + column.column] : 0.0f;
      const float out =
          column.Step(q + i * kMaxDim, k + i * kMaxDim, value, scalars[i * 3], scalars[i * 3 + 1], scalars[i * 3 + 2]);
      if (has_column && column.first_row == 0) o[i * kMaxDim + column.column] = out;
      const int32_t end = begin + i + 1;
      const bool is_snapshot = snapshot < last_snapshot && maps.snapshot_ends[snapshot] == end;
      const int32_t snapshot_slot = is_snapshot ? maps.snapshot_slots[snapshot] : -1;
      snapshot += is_snapshot ? 1 : 0;
      // One store for both, as it takes registers.
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        const int32_t slot = which == 0 ? snapshot_slot : end == rows.num_kept ? rows.table_row : -1;
        if (slot >= 0 && has_column) column.Store(shape, state_of(slot));
      }
    }
    __syncthreads();
    for (int32_t i = warp; i < count; i += num_warps)
      if (begin + i >= rows.num_replayed) FinishRow<T>(shape, rows, weights.norm, begin + i, head, o + i * kMaxDim, y);
    __syncthreads();
  }
}

// Block (request, part): a thread has a column of the rows that the request's slots keep. The blocks of request R clear
// rows of y after the requests'.
template <typename T>
__global__ __launch_bounds__(kStoreThreads) void StoreDeltaRowsKernel(DeltaShape shape, DeltaMaps maps,
                                                                      DevicePtr<const T> qkvz, DevicePtr<const T> ba,
                                                                      DevicePtr<T> conv_rows, DevicePtr<T> draft_rows,
                                                                      DevicePtr<T> y) {
  const auto r = static_cast<int32_t>(blockIdx.x);
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kStoreThreads + threadIdx.x;
  if (r == shape.num_requests) {
    if (c >= shape.values()) return;
    for (int32_t row = maps.query_start_loc[r]; row < shape.num_tokens; ++row) y[row * shape.values() + c] = T{};
    return;
  }
  if (maps.query_start_loc[r] == maps.query_start_loc[r + 1]) return;
  const DeltaRows<T> rows(shape, maps, r, qkvz, ba, conv_rows, draft_rows);
  const int64_t draft_width = rows.qkv + rows.num_gates;
  if (c >= draft_width) return;
  const auto store_history = [&](int32_t end, int32_t slot) {
    for (int32_t j = 0; j < rows.history; ++j)
      conv_rows[(int64_t{slot} * rows.history + j) * rows.qkv + c] = rows.RawElement(end - rows.history + j, c);
  };
  if (c < rows.qkv) {
    for (int32_t i = maps.cu_snapshots[r]; i < maps.cu_snapshots[r + 1]; ++i)
      store_history(maps.snapshot_ends[i], maps.snapshot_slots[i]);
    // In place row j is written before none but later ones are read.
    store_history(rows.num_kept, rows.table_row);
  }
  const DevicePtr<T> to = draft_rows + int64_t{rows.table_row} * shape.max_drafts * draft_width + c;
  for (int32_t row = rows.num_kept; row < rows.count; ++row) {
    const int64_t step_row = row - rows.num_replayed;
    to[(row - rows.num_kept) * draft_width] =
        c < rows.qkv ? rows.RawElement(row, c) : rows.ba[step_row * rows.num_gates + c - rows.qkv];
  }
}

template <typename T>
Error LaunchGatedDelta(const GatedDeltaNetParams& p, const DeltaShape& shape, Stream stream) {
  const auto& s = p.states;
  const DeltaMaps maps{DevicePtr<const int32_t>(s.table_rows),      DevicePtr<const int32_t>(s.source),
                       DevicePtr<const int32_t>(s.num_replayed),    DevicePtr<const int32_t>(s.num_certain),
                       DevicePtr<const int32_t>(s.query_start_loc), DevicePtr<const int32_t>(s.cu_snapshots),
                       DevicePtr<const int32_t>(s.snapshot_ends),   DevicePtr<const int32_t>(s.snapshot_slots)};
  const DeltaWeightArrays weights{DevicePtr<const float>(p.weights.conv_weight),
                                  DevicePtr<const float>(p.weights.a_log), DevicePtr<const float>(p.weights.dt_bias),
                                  DevicePtr<const float>(p.weights.norm_weight)};
  const auto qkvz = DevicePtr<const T>(p.qkvz);
  const auto ba = DevicePtr<const T>(p.ba);
  const auto num_requests = static_cast<unsigned>(p.num_requests);
  const auto num_threads = static_cast<unsigned>(DivideUp(shape.value_dim * kColumnThreads, kWarpSize) * kWarpSize);
  const LaunchShape heads{dim3(num_requests, static_cast<unsigned>(shape.num_value_heads)), dim3(num_threads)};
  if (const Error error = Launch<GatedDeltaKernel<T>>(
          heads, stream, shape, maps, weights, qkvz, ba, DevicePtr<const T>(p.memory.conv_rows),
          DevicePtr<const T>(p.memory.draft_rows), DevicePtr<float>(p.memory.state), DevicePtr<T>(p.y)))
    return error;
  const auto num_parts = static_cast<unsigned>(DivideUp(shape.qkv() + shape.gates(), kStoreThreads));
  const LaunchShape columns{dim3(num_requests + 1, num_parts), dim3(kStoreThreads)};
  return Launch<StoreDeltaRowsKernel<T>>(columns, stream, shape, maps, qkvz, ba, DevicePtr<T>(p.memory.conv_rows),
                                         DevicePtr<T>(p.memory.draft_rows), DevicePtr<T>(p.y));
}

}  // namespace

Error GatedDeltaNet(const GatedDeltaNetParams& p, Stream stream) {
  if (const Error error = CheckGatedDeltaSizes(p); error != nullptr) return error;
  if (p.heads.key_dim > kMaxDim || p.heads.value_dim > kMaxDim)
    return "state: expected heads of at most 128 rows and columns on a GPU, got larger ones";
  const DeltaShape shape{p.heads.num_key_heads,
                         p.heads.num_value_heads,
                         p.heads.key_dim,
                         p.heads.value_dim,
                         p.conv_width,
                         p.max_drafts,
                         p.num_requests,
                         p.num_tokens,
                         p.eps};
  return WithElement(p.dtype, [&](auto element) { return LaunchGatedDelta<decltype(element)>(p, shape, stream); });
}

}  // namespace fdsd::cuda
