#pragma once
// What a warp computes for a tile of query rows: the values of its keys times their weights.
#include "attention_scores.h"

namespace fdsd::cuda {

// Bytes of a row of values as products take them.
template <typename Cached>
__device__ __host__ __forceinline__ int32_t ValueRowBytes(const AttentionShape& shape) {
  return shape.PartSize() * (kIsScaled<Cached> ? 2 : static_cast<int32_t>(sizeof(Cached))) + kPadding;
}

// A unit's values as products take them, and where: elements of a byte go to `staged`, times their scales.
template <typename Cached>
__device__ __forceinline__ DevicePtr<const uint8_t> PrepareValues(const AttentionShape& shape, const AttentionArrays& a,
                                                                  const UnitKeys& keys, DevicePtr<uint8_t> slot,
                                                                  DevicePtr<uint8_t> staged) {
  if constexpr (!kIsScaled<Cached>) {
    return slot;
  } else {
    const int lane = threadIdx.x % kWarpSize;
    const int row_bytes = UnitStream<Cached>::RowBytes(shape);
    const int num_words = keys.tile.num_columns / 4;
    const int64_t index = keys.Index(lane % kUnitKeys);
    const float scale = index < 0 ? 0.0f : static_cast<float>(a.v_scale[index]);
    for (int i = lane; i < kUnitKeys * num_words; i += kWarpSize) {
      const int row = i / num_words;
      const int word = i % num_words;
      uint32_t words[2];
      const float factor = __shfl_sync(kAllLanes, scale, row);
      ScaledWords<Cached>(ViewAs<const uint32_t>(slot + row * row_bytes)[word], factor, words);
      const DevicePtr<uint32_t> to = ViewAs<uint32_t>(staged + row * ValueRowBytes<Cached>(shape));
      to[2 * word] = words[0];
      to[2 * word + 1] = words[1];
    }
    __syncwarp();
    return staged;
  }
}

// Whether one of a unit's values is infinite or NaN.
template <typename Cached>
__device__ __forceinline__ bool HasBadValue(const AttentionShape& shape, const AttentionArrays& a, const UnitKeys& keys,
                                            DevicePtr<const uint8_t> slot) {
  const int lane = threadIdx.x % kWarpSize;
  bool is_bad = false;
  if constexpr (kIsScaled<Cached>) {
    const int64_t index = keys.Index(lane % kUnitKeys);
    is_bad = index >= 0 && IsBad<float>(__float_as_uint(a.v_scale[index]));
  } else {
    const int row_words = keys.tile.num_columns * static_cast<int>(sizeof(Cached)) / 4;
#pragma unroll 1
    for (int i = lane; i < kUnitKeys * row_words; i += kWarpSize) {
      const auto row = ViewAs<const uint32_t>(slot + i / row_words * ValueRowBytes<Cached>(shape));
      is_bad = is_bad || IsBad<Cached>(row[i % row_words]);
    }
  }
  return __ballot_sync(kAllLanes, is_bad) != 0;
}

// The warp's weights as products take them: words of a fragment for each unit. Those of float32 are in shared memory,
// [64 keys, 16 rows].
template <typename Cached>
struct Weights {
  uint32_t words[kUnits][4];
  DevicePtr<float> floats;

  __device__ __forceinline__ Weights(const float (*weights)[4], DevicePtr<uint8_t> staged)
      : floats(ViewAs<float>(staged)) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i) {
      const float* pair = weights[i / 4 * kUnitTiles + i % 4 / 2] + i % 2 * 2;
      words[i / 4][i % 4] = ExactPair<Cached>(pair[0], pair[1]);
      if constexpr (sizeof(Cached) == 4) {
        const int key = (i / 4 * kUnitTiles + i % 4 / 2) * kMatrixColumns + lane % 4 * 2;
        floats[key * kTileRows + lane / 4 + i % 2 * 8] = pair[0];
        floats[(key + 1) * kTileRows + lane / 4 + i % 2 * 8] = pair[1];
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Take(int unit, uint32_t* rows) const {
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i) {
      if (i / 4 == unit) rows[i % 4] = words[i / 4][i % 4];
    }
  }
};

// sums += a unit's values with their weights, in the rows of a new token.
template <typename Cached, int kColumnTiles>
__device__ __forceinline__ void AddUnit(int num_columns, int row_bytes, const Weights<Cached>& weights, int unit,
                                        DevicePtr<const uint8_t> values, const bool* is_row_of, float (*sums)[4]) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (sizeof(Cached) == 4) {
#pragma unroll 1
    for (int key = 0; key < kUnitKeys; ++key) {
      const DevicePtr<float> own = weights.floats + ((unit * kUnitKeys + key) * kTileRows + lane / 4);
      const float weight = own[0];
      const float other_weight = own[8];
      const DevicePtr<const float> row = ViewAs<const float>(values + key * row_bytes);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        if (n * kMatrixColumns >= num_columns) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = row[n * kMatrixColumns + lane % 4 * 2 + i];
          if (is_row_of[0]) sums[n][i] = fmaf(weight, value, sums[n][i]);
          if (is_row_of[1]) sums[n][2 + i] = fmaf(other_weight, value, sums[n][2 + i]);
        }
      }
    }
  } else {
    uint32_t rows[4];
    weights.Take(unit, rows);
    const DevicePtr<const bf16> own = ViewAs<const bf16>(values + lane % kUnitKeys * row_bytes);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (n * kMatrixColumns >= num_columns) break;
      uint32_t columns[2];
      LoadColumns(own + n * kMatrixColumns, columns);
      float new_sums[4] = {sums[n][0], sums[n][1], sums[n][2], sums[n][3]};
      AddPairProduct<Cached>(new_sums, rows, columns);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = is_row_of[i / 2] ? new_sums[i] : sums[n][i];
    }
  }
}

// Adds the weighted values of the warp's keys. A value that is infinite or NaN is only for the rows that see it. So
// where some do not, new tokens are taken one after the other, each with what it sees.
template <typename Cached, int kColumnTiles>
__device__ __forceinline__ void AddValues(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                          const UnitStream<Cached>& units, const Weights<Cached>& weights,
                                          DevicePtr<uint8_t> staged, float (*sums)[4]) {
#pragma unroll 1
  for (int unit = 0; unit < units.num_units(); ++unit) {
    const int stage = units.ValueStage(unit);
    bool is_apart = units.IsApart(unit);
    DevicePtr<uint8_t> slot;
    if (!is_apart) {
      slot = units.Wait(stage);
      is_apart = units.IsPartlySeen(unit) && HasBadValue<Cached>(shape, a, units.KeysOf(unit, kNobody), slot);
    }
    const int last = is_apart ? tile.LastToken(shape) : kNobody;
#pragma unroll 1
    for (int token = is_apart ? tile.FirstToken(shape) : kNobody; token <= last; ++token) {
      if (is_apart) slot = units.Fetch(stage, token);
      const auto values = PrepareValues<Cached>(shape, a, units.KeysOf(unit, token), slot, staged);
      const bool is_row_of[2] = {IsRowOf(shape, tile, token, 0), IsRowOf(shape, tile, token, 2)};
      AddUnit<Cached, kColumnTiles>(tile.num_columns, ValueRowBytes<Cached>(shape), weights, unit, values, is_row_of,
                                    sums);
    }
    units.Release(stage);
  }
}

}  // namespace fdsd::cuda
