#pragma once
// What warpgroups compute for a wide tile of query rows, and where a thread's share of it comes from and goes to. A
// warp has 16 of the rows, in the fragments of a warp's product (matrix.h), whatever of it the products of its
// warpgroup make.
#include "attention_partial.h"
#include "attention_steps.h"
#include "attention_values.h"

namespace fdsd::cuda {

// First of the block's rows that the thread's warp has.
__device__ __forceinline__ int WarpRow() { return static_cast<int>(threadIdx.x) / kWarpSize * kTileRows; }
// A thread's rows are this one of its warp's and that 8 on; its columns this one and the next of every eight.
__device__ __forceinline__ int OwnRow(int half) { return static_cast<int>(threadIdx.x) % kWarpSize / 4 + 8 * half; }
__device__ __forceinline__ int OwnColumn(int tile) {
  return tile * kMatrixColumns + static_cast<int>(threadIdx.x) % 4 * 2;
}

// The warp's queries as words of fragments, 16 elements at a time; zeros where there is no row or element.
template <int kHead>
struct QueryWords {
  static constexpr int kSteps = kHead / (2 * kMatrixWords);
  uint32_t words[kSteps][4];

  __device__ __forceinline__ QueryWords(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& own) {
    const int64_t rows[2] = {own.HeadRow(shape, OwnRow(0)), own.HeadRow(shape, OwnRow(1))};
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int64_t row = rows[i % 2];
      const int column = OwnColumn(i / 2);
      const bool is_there = row >= 0 && column < shape.cache.head_dim;
      words[i / 4][i % 4] = is_there ? Load(shape, a, row * shape.cache.head_dim + column) : 0u;
    }
    HoldWords<4 * kSteps>(words[0]);
  }

 private:
  static __device__ __forceinline__ uint32_t Load(const AttentionShape& shape, const AttentionArrays& a, int64_t at) {
    if (!shape.is_float32) return ViewAs<const uint32_t>(a.q)[at / 2];
    const DevicePtr<const float> q = ViewAs<const float>(a.q);
    return RoundedPair<bf16>(q[at], q[at + 1]);
  }
};

// The result of the warp's rows over some keys, see Partial; the thread's elements as a product leaves them.
template <typename Block>
struct WideResult {
  static constexpr int kTiles = Block::kColumnTiles;
  float sums[kTiles][4];
  float max[2];
  float total[2];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / 4][i % 4] = 0.0f;
    max[0] = max[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // Merges what lies in a row of a workspace, [columns, max, total].
  __device__ __forceinline__ void MergeRow(DevicePtr<const float> row, int half, int num_columns) {
    const MergeFactors factors(max[half], row[num_columns]);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int column = OwnColumn(i / 2) + i % 2;
      float& sum = sums[i / 2][2 * half + i % 2];
      if (column < num_columns) sum = factors.Merge(sum, row[column]);
    }
    total[half] = factors.Merge(total[half], row[num_columns + 1]);
    max[half] = factors.max;
  }
  __device__ __forceinline__ void StoreRow(DevicePtr<float> row, int half, int num_columns) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int column = OwnColumn(i / 2) + i % 2;
      if (column < num_columns) row[column] = sums[i / 2][2 * half + i % 2];
    }
    if (threadIdx.x % 4 != 0) return;
    row[num_columns] = max[half];
    row[num_columns + 1] = total[half];
  }

  // The merged partitions that a tile of the request's group has computed, in order.
  __device__ __forceinline__ void LoadShared(const AttentionShape& shape, const TilePlace& own,
                                             DevicePtr<const float> results) {
    Clear();
    if (own.num_shared == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own.HeadRow(shape, OwnRow(half)) < 0) continue;
      const DevicePtr<const float> row = results + own.SharedOffset(shape, OwnRow(half));
      const int num_slots = shape.num_slots == 1 ? 1 : own.num_shared;
#pragma unroll 1
      for (int slot = 0; slot < num_slots; ++slot) MergeRow(row + slot * shape.PartialSize(), half, own.num_columns);
    }
  }
  // Leaves results over a group's partition, or over all of them, for its requests.
  __device__ __forceinline__ void StoreShared(const AttentionShape& shape, const TilePlace& own, int partition,
                                              DevicePtr<float> results) const {
    const int slot = shape.num_slots == 1 ? 0 : partition;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own.HeadRow(shape, OwnRow(half)) < 0) continue;
      const int64_t at = own.SharedOffset(shape, OwnRow(half)) + slot * shape.PartialSize();
      StoreRow(results + at, half, own.num_columns);
    }
  }
  // Leaves results over one of the tile's own partitions for another kernel.
  __device__ __forceinline__ void StoreOwn(const AttentionShape& shape, const TilePlace& own, int partition,
                                           DevicePtr<float> partials) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own.HeadRow(shape, OwnRow(half)) < 0) continue;
      const int64_t at = own.PartialOffset(shape, partition) + OwnRow(half) * (own.num_columns + 2);
      StoreRow(partials + at, half, own.num_columns);
    }
  }

  // The finished rows.
  __device__ __forceinline__ void Write(const AttentionShape& shape, const AttentionArrays& a,
                                        const TilePlace& own) const {
    const DevicePtr<uint8_t> y = a.y;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = own.HeadRow(shape, OwnRow(half));
      if (row < 0) continue;
      const SinkFactors sink(shape, a.sinks, row, max[half], total[half]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (OwnColumn(n) >= own.num_columns) break;
        const int64_t at = row * shape.cache.head_dim + own.first_column + OwnColumn(n);
        const float low = Finished(sums[n][2 * half] * sink.factor, sink.total);
        const float high = Finished(sums[n][2 * half + 1] * sink.factor, sink.total);
        if (shape.is_float32) {
          ViewAs<float>(y)[at] = low;
          ViewAs<float>(y)[at + 1] = high;
        } else {
          ViewAs<uint32_t>(y)[at / 2] = RoundedPair<bf16>(low, high);
        }
      }
    }
  }
};

// What partitions before have summed, a thread's own, in shared memory since registers are for what is computed.
template <typename Block>
struct ResultBefore {
  float max[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.0f, 0.0f};
  bool is_stored = false;  // else its sums are zeros

  __device__ __forceinline__ void Store(const WideResult<Block>& result) {
#pragma unroll
    for (int i = 0; i < 4 * Block::kColumnTiles; ++i) Sum(i) = result.sums[i / 4][i % 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = result.max[half];
      total[half] = result.total[half];
    }
    is_stored = true;
  }

  // This and a partition's result, in its place.
  __device__ __forceinline__ void MergeInto(WideResult<Block>* result) const {
    const MergeFactors factors[2] = {MergeFactors(max[0], result->max[0]), MergeFactors(max[1], result->max[1])};
#pragma unroll
    for (int i = 0; i < 4 * Block::kColumnTiles; ++i) {
      float& sum = result->sums[i / 4][i % 4];
      sum = factors[i % 4 / 2].Merge(is_stored ? static_cast<float>(Sum(i)) : 0.0f, sum);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      result->total[half] = factors[half].Merge(total[half], result->total[half]);
      result->max[half] = factors[half].max;
    }
  }

 private:
  static __device__ __forceinline__ decltype(auto) Sum(int i) {
    return (ViewAs<float>(DynamicShared<uint8_t>() + Block::kBeforeAt) + i * Block::kThreads)[threadIdx.x];
  }
};

}  // namespace fdsd::cuda
