#pragma once
// What a warp computes for a tile of query rows: the scores of its keys, and their weights.
#include "attention_units.h"

namespace fdsd::cuda {

constexpr int kUnitTiles = kUnitKeys / kMatrixColumns;  // of scores
constexpr int kKeyTiles = kUnits * kUnitTiles;
constexpr float kMasked = -INFINITY;

// The rows of a tile in shared memory: words of two numbers, or floats.
template <typename Cached>
__device__ __host__ __forceinline__ int32_t QueryRowBytes(int32_t head_dim) {
  return head_dim * (sizeof(Cached) == 4 ? 4 : 2) + kPadding;
}

// The queries of a tile to shared memory; zeros where there is no row.
template <typename T, typename Cached>
__device__ void LoadQueries(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                            DevicePtr<uint8_t> queries) {
  const int head_dim = shape.cache.head_dim;
  const DevicePtr<const T> q = ViewAs<const T>(a.q);
  for (int i = threadIdx.x; i < kTileRows * head_dim / 2; i += kAttentionThreads) {
    const int row = i / (head_dim / 2);
    const int word = i % (head_dim / 2);
    const int64_t head = tile.HeadRow(shape, row);
    const int64_t at = head * head_dim + word * 2;
    const float low = head >= 0 ? LoadFloat<T>(q, at) : 0.0f;
    const float high = head >= 0 ? LoadFloat<T>(q, at + 1) : 0.0f;
    const DevicePtr<uint8_t> to = queries + row * QueryRowBytes<Cached>(head_dim);
    if constexpr (sizeof(Cached) == 4) {
      ViewAs<float>(to)[2 * word] = low;
      ViewAs<float>(to)[2 * word + 1] = high;
    } else {
      ViewAs<uint32_t>(to)[QueryWord<Cached>(word)] = RoundedPair<Cached>(low, high);
    }
  }
}

// scores += those of a part of a unit's keys, with the same elements of queries: as products leave them.
template <typename Cached>
__device__ __forceinline__ void ScoreUnit(const AttentionShape& shape, int part, DevicePtr<const uint8_t> queries,
                                          DevicePtr<const uint8_t> keys, float (*scores)[4]) {
  const int lane = threadIdx.x % kWarpSize;
  const int query_bytes = QueryRowBytes<Cached>(shape.cache.head_dim);
  const int key_bytes = UnitStream<Cached>::RowBytes(shape);
  const int num_elements = min(shape.cache.head_dim - part * kPartColumns, kPartColumns);
  queries = queries + part * kPartColumns * (sizeof(Cached) == 4 ? 4 : 2);
  if constexpr (sizeof(Cached) == 4) {
    const DevicePtr<const float> row = ViewAs<const float>(queries + lane / 4 * query_bytes);
    const DevicePtr<const float> other_row = ViewAs<const float>(queries + (lane / 4 + 8) * query_bytes);
    for (int d = 0; d < num_elements; ++d) {
#pragma unroll
      for (int i = 0; i < 2 * kUnitTiles; ++i) {
        const int key = i / 2 * kMatrixColumns + lane % 4 * 2 + i % 2;
        const float element = ViewAs<const float>(keys + key * key_bytes)[d];
        scores[i / 2][i % 2] = fmaf(row[d], element, scores[i / 2][i % 2]);
        scores[i / 2][2 + i % 2] = fmaf(other_row[d], element, scores[i / 2][2 + i % 2]);
      }
    }
  } else {
    const DevicePtr<const uint8_t> own_row = queries + (lane % 16 * query_bytes + lane / 16 * 16);
    for (int d = 0; d < num_elements; d += 2 * kMatrixWords) {
      uint32_t rows[4];
      uint32_t columns[kUnitTiles][2];
      LoadRowWords(own_row + 2 * d, rows);
      if constexpr (kIsScaled<Cached>) {
#pragma unroll
        for (int n = 0; n < kUnitTiles; ++n) {
          const int at = (n * kMatrixColumns + lane / 4) * key_bytes + d + lane % 4 * 4;
          ExactWords<Cached>(ViewAs<const uint32_t>(keys + at)[0], columns[n]);
        }
      } else {
        LoadRowWords(keys + ((lane % 8 + lane / 16 * 8) * key_bytes + 2 * d + lane / 8 % 2 * 16), columns[0]);
      }
#pragma unroll
      for (int n = 0; n < kUnitTiles; ++n) AddPairProduct<Cached>(scores[n], rows, columns[n]);
    }
  }
}

// The scores of a unit to where those of all units are. The loop over units is worth no copies of its code.
__device__ __forceinline__ void PutUnit(const float (*own)[4], int unit, float (*all)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * kKeyTiles; ++i) {
    if (i / 4 / kUnitTiles == unit) all[i / 4][i % 4] = own[i / 4 % kUnitTiles][i % 4];
  }
}

// Whether a row of the lane, that of elements 0 and 1 of a product or that of 2 and 3, is of this new token.
__device__ __forceinline__ bool IsRowOf(const AttentionShape& shape, const TilePlace& tile, int token, int element) {
  const int lane = threadIdx.x % kWarpSize;
  return token == kNobody || tile.TokenOf(shape, lane / 4 + element / 2 * 8) == token;
}

// The warp's scores of its keys.
template <typename Cached>
__device__ __forceinline__ void ScoreKeys(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                          const UnitStream<Cached>& units, DevicePtr<const uint8_t> queries,
                                          float (*scores)[4]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int unit = 0; unit < units.num_units(); ++unit) {
    const bool is_apart = units.IsApart(unit);
    const int last = is_apart ? tile.LastToken(shape) : kNobody;
    float own[kUnitTiles][4] = {};
#pragma unroll 1
    for (int token = is_apart ? tile.FirstToken(shape) : kNobody; token <= last; ++token) {
      float scale = 1.0f;  // of the unit's key lane % 16
      if constexpr (kIsScaled<Cached>) {
        const int64_t index = units.KeysOf(unit, token).Index(lane % kUnitKeys);
        scale = index < 0 ? 0.0f : static_cast<float>(a.k_scale[index]);
      }
      float found[kUnitTiles][4] = {};
#pragma unroll 1
      for (int part = 0; part < shape.NumParts(); ++part) {
        const int stage = units.KeyStage(unit, part);
        ScoreUnit<Cached>(shape, part, queries, is_apart ? units.Fetch(stage, token) : units.Wait(stage), found);
        if (!is_apart) units.Release(stage);
      }
#pragma unroll
      for (int i = 0; i < 2 * kUnitTiles; ++i) {
        float factor = 1.0f;
        if constexpr (kIsScaled<Cached>)
          factor = __shfl_sync(kAllLanes, scale, i / 2 * kMatrixColumns + lane % 4 * 2 + i % 2);
#pragma unroll
        for (int element = i % 2; element < 4; element += 2) {
          if (IsRowOf(shape, tile, token, element)) own[i / 2][element] = found[i / 2][element] * factor;
        }
      }
    }
    PutUnit(own, unit, scores);
    for (int part = 0; is_apart && part < shape.NumParts(); ++part) units.Release(units.KeyStage(unit, part));
  }
}

// Scores to weights exp2(score - max), as they are multiplied; -inf where a row does not see a key. half = 0: row lane
// / 4, half = 1: 8 rows on.
template <typename Cached>
__device__ __forceinline__ void WeighKeys(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                          int first_key, int half, float (*scores)[4], float* max, float* sum) {
  const int lane = threadIdx.x % kWarpSize;
  const int position = tile.Position(shape, a, lane / 4 + 8 * half);
  float largest = kMasked;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + n * kMatrixColumns + lane % 4 * 2 + i;
      float& score = scores[n][2 * half + i];
      score = shape.IsSeen(key, position) ? shape.Capped(score * shape.scale * kLog2E) : kMasked;
      largest = fmaxf(largest, score);
    }
  }
  for (int lanes = 1; lanes < 4; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
  float total = 0.0f;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = scores[n][2 * half + i];
      score = score == kMasked ? 0.0f : exp2f(score - largest);
      if constexpr (sizeof(Cached) != 4) score = ToFloat(FromFloat<WordOf<Cached>>(score));
      total += score;
    }
  }
  for (int lanes = 1; lanes < 4; lanes *= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
  *max = largest;
  *sum = total;
}

}  // namespace fdsd::cuda
