#pragma once
// The results of attention over some of the keys of a tile of query rows.
#include "attention_tile.h"

namespace fdsd::cuda {

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

  // Keys that a row does not see change nothing: the other factor is then 1.
  __device__ void Merge(const Partial& other) {
    const float largest = fmaxf(max, other.max);
    const float factor = max == -INFINITY ? 0.0f : exp2f(max - largest);
    const float other_factor = other.max == -INFINITY ? 0.0f : exp2f(other.max - largest);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) sums[n] = sums[n] * factor + other.sums[n] * other_factor;
    total = total * factor + other.total * other_factor;
    max = largest;
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

  // The merged partitions that a tile of the request's group has computed, in order; without any, over no key.
  __device__ void LoadShared(const AttentionShape& shape, const TilePlace& tile, DevicePtr<const float> results) {
    Clear();
    if (tile.first_partition == 0 || tile.HeadRow(shape, Row()) < 0) return;
    const DevicePtr<const float> row = results + tile.SharedOffset(shape, Row());
    if (shape.num_slots == 1) return LoadRow(row, tile.num_columns);
    for (int partition = 0; partition < tile.first_partition; ++partition) {
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
  __device__ void Write(const AttentionShape& shape, const TilePlace& tile, DevicePtr<T> y) const {
    const int64_t row = tile.HeadRow(shape, Row());
    if (row < 0) return;
    const DevicePtr<T> to = y + (row * shape.cache.head_dim + tile.first_column);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (Column(n) < tile.num_columns) to[Column(n)] = FromFloat<T>(sums[n] / total);
    }
  }
};

}  // namespace fdsd::cuda
