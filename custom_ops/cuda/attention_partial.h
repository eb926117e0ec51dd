#pragma once
// The results of attention over some of the keys of a tile of query rows.
#include "attention_tile.h"

namespace fdsd::cuda {

// How the sums and the totals of two results of a row become one. Keys that a row does not see change nothing: the
// other factor is then 1.
struct MergeFactors {
  float max;
  float factor;
  float other_factor;

  __device__ __forceinline__ MergeFactors(float one, float other)
      : max(fmaxf(one, other)),
        factor(one == -INFINITY ? 0.0f : exp2f(one - max)),
        other_factor(other == -INFINITY ? 0.0f : exp2f(other - max)) {}
  __device__ __forceinline__ float Merge(float one, float other) const { return one * factor + other * other_factor; }
};

// A row's result and then a key of value 0, the sink of its head: the factor of its sums, and its new total.
struct SinkFactors {
  float factor = 1.0f;
  float total;

  // `row` is one of q, counted in heads.
  __device__ __forceinline__ SinkFactors(const AttentionShape& shape, DevicePtr<const float> sinks, int64_t row,
                                         float max, float total)
      : total(total) {
    if (sinks == nullptr) return;
    const float score = sinks[row % shape.num_heads] * kLog2E;
    const MergeFactors factors(max, score);
    factor = factors.factor;
    this->total = factors.Merge(total, 1.0f);
  }
};

// An element of y. Adding 0 makes a zero that came of no key or of a tiny negative weight +0, whichever merges it met.
__device__ __forceinline__ float Finished(float sum, float total) { return (sum + 0.0f) / total; }

// The result of a tile's rows over some keys, spread over the block: a thread has every eighth element of a row. `sums`
// are of values times exp2(score - max), `total` is of the weights.
template <int kColumnTiles>
struct Partial {
  static constexpr int kThreadsPerRow = kAttentionThreads / kTileRows;
  static_assert(kThreadsPerRow == kMatrixColumns);

  float sums[kColumnTiles];
  float max;
  float total;

  static __device__ __forceinline__ int Row() { return static_cast<int>(threadIdx.x) / kThreadsPerRow; }
  static __device__ __forceinline__ int Column(int n) {
    return n * kThreadsPerRow + static_cast<int>(threadIdx.x) % kThreadsPerRow;
  }

  // Over no key.
  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) sums[n] = 0.0f;
    max = -INFINITY;
    total = 0.0f;
  }

  __device__ void Merge(const Partial& other) {
    const MergeFactors factors(max, other.max);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) sums[n] = factors.Merge(sums[n], other.sums[n]);
    total = factors.Merge(total, other.total);
    max = factors.max;
  }

  __device__ void Load(DevicePtr<const float> tile, int num_columns) {
    LoadRow(tile + Row() * (num_columns + 2), num_columns);
  }
  __device__ void LoadRow(DevicePtr<const float> row, int num_columns) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
      sums[n] = Column(n) < num_columns ? static_cast<float>(row[Column(n)]) : 0.0f;
    max = row[num_columns];
    total = row[num_columns + 1];
  }

  __device__ void Store(DevicePtr<float> tile, int num_columns) const {
    StoreRow(tile + Row() * (num_columns + 2), num_columns);
  }
  __device__ void StoreRow(DevicePtr<float> row, int num_columns) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (Column(n) < num_columns) row[Column(n)] = sums[n];
    }
    if (threadIdx.x % kThreadsPerRow != 0) return;
    row[num_columns] = max;
    row[num_columns + 1] = total;
  }

  // The result of a row that there is over one of its tile's partitions; of others over no key.
  __device__ void LoadOwn(const AttentionShape& shape, const TilePlace& tile, int partition,
                          DevicePtr<const float> partials) {
    Clear();
    if (tile.HeadRow(shape, Row()) >= 0) Load(partials + tile.PartialOffset(shape, partition), tile.num_columns);
  }
  __device__ void StoreOwn(const AttentionShape& shape, const TilePlace& tile, int partition,
                           DevicePtr<float> partials) const {
    if (tile.HeadRow(shape, Row()) >= 0) Store(partials + tile.PartialOffset(shape, partition), tile.num_columns);
  }

  // The merged partitions that a tile of the request's group has computed, in order; without any, over no key.
  __device__ void LoadShared(const AttentionShape& shape, const TilePlace& tile, DevicePtr<const float> results) {
    Clear();
    if (tile.num_shared == 0 || tile.HeadRow(shape, Row()) < 0) return;
    const DevicePtr<const float> row = results + tile.SharedOffset(shape, Row());
    if (shape.num_slots == 1) return LoadRow(row, tile.num_columns);
    for (int partition = 0; partition < tile.num_shared; ++partition) {
      Partial next;
      next.LoadRow(row + partition * shape.PartialSize(), tile.num_columns);
      Merge(next);
    }
  }

  // Leaves results over a group's partition, or over all of them, for its requests.
  __device__ void StoreShared(const AttentionShape& shape, const TilePlace& tile, int partition,
                              DevicePtr<float> results) const {
    if (tile.HeadRow(shape, Row()) < 0) return;
    const int slot = shape.num_slots == 1 ? 0 : partition;
    StoreRow(results + tile.SharedOffset(shape, Row()) + slot * shape.PartialSize(), tile.num_columns);
  }

  // The finished rows.
  template <typename T>
  __device__ void Write(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile) const {
    const DevicePtr<T> y = ViewAs<T>(a.y);
    const int64_t row = tile.HeadRow(shape, Row());
    if (row < 0) return;
    const SinkFactors sink(shape, a.sinks, row, max, total);
    const DevicePtr<T> to = y + (row * shape.cache.head_dim + tile.first_column);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (Column(n) < tile.num_columns) to[Column(n)] = FromFloat<T>(Finished(sums[n] * sink.factor, sink.total));
    }
  }
};

}  // namespace fdsd::cuda
