#pragma once
// Units of a wide tile that each of its new tokens reads by itself. That is so in a tree of drafts, where each sees
// other keys, and where values that are infinite or NaN are for some rows only. Their rows are fetched for two new
// tokens at a time and multiplied by all rows of the tile. Only the rows of the token keep the result.
#include "attention_wide.h"

namespace fdsd::cuda {

template <typename Block>
class ApartUnits {
 public:
  using Cached = typename Block::Cached;
  using Queries = QueryWords<Block::kHead>;

  __device__ __forceinline__ ApartUnits(const AttentionShape& shape, const AttentionArrays& a, const TilePlace& tile,
                                        const TilePlace& own)
      : shape_(shape), a_(a), tile_(tile), own_(own) {}

  // Whether new tokens of the tile see different keys in these 64.
  __device__ __forceinline__ bool IsTree(int block) const {
    return tile_.is_tree && (block + 1) * kStepKeys > tile_.num_before;
  }
  // Whether all rows see all of these 64 keys, wherever they stand in the tile.
  __device__ __forceinline__ bool IsWhole(int block) const {
    const int seen = tile_.num_before + (tile_.is_tree ? 0 : tile_.FirstToken(shape_) + 1);
    return block * kStepKeys >= shape_.FirstKey(tile_.end_key - 1) && (block + 1) * kStepKeys <= seen;
  }
  // Whether one of 64 values is infinite or NaN. Alike for all threads.
  __device__ __forceinline__ bool HasBadValue(DevicePtr<const uint8_t> values) const {
    bool is_bad = false;
#pragma unroll 4
    for (int i = threadIdx.x % kWarpSize; i < (Block::kStepBytes - Block::kValuesAt) / kChunkBytes; i += kWarpSize) {
      const uint4 words = ViewAs<const uint4>(values)[i];
      is_bad = is_bad || IsBad<bf16>(words.x) || IsBad<bf16>(words.y) || IsBad<bf16>(words.z) || IsBad<bf16>(words.w);
    }
    return __ballot_sync(kAllLanes, is_bad) != 0;
  }

  // The scores of a tree's keys among these 64. All threads of the block.
  __device__ __forceinline__ void Score(int block, const Queries& queries, float (*scores)[4]) const {
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      const int first = block * kStepKeys + unit * kUnitKeys;
      if (!IsTreeUnit(first) || first >= tile_.end_key) continue;
#pragma unroll 1
      for (int token = tile_.FirstToken(shape_); token <= tile_.LastToken(shape_); ++token) {
        const int place = (token - tile_.FirstToken(shape_)) % kApartTokens;
        if (place == 0) Fetch<false>(first, token);
        ScoreToken(unit, token, place, queries, scores);
      }
    }
  }

  // sums += the values of these 64 keys with their weights, unit by unit. All threads of the block.
  __device__ __forceinline__ void AddValues(int block, bool is_bad, const uint32_t (*weights)[4],
                                            DevicePtr<const uint8_t> values, float (*sums)[4]) const {
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      const int first = block * kStepKeys + unit * kUnitKeys;
      if (first >= tile_.end_key) return;
      uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4 * kUnits; ++i) {
        if (i / 4 == unit) rows[i % 4] = weights[i / 4][i % 4];
      }
      const bool is_apart = is_bad || IsTreeUnit(first);
      const int last = is_apart ? tile_.LastToken(shape_) : kNobody;
#pragma unroll 1
      for (int token = is_apart ? tile_.FirstToken(shape_) : kNobody; token <= last; ++token) {
        const int place = (token - tile_.FirstToken(shape_)) % kApartTokens;
        if (is_apart && place == 0) Fetch<true>(first, token);
        const auto fetched = DevicePtr<const uint8_t>(Shared<uint8_t>(Block::kApartAt));
        const auto unit_values = is_apart ? fetched + place * kUnitKeys * kWarpgroupRowBytes
                                          : values + unit * kUnitKeys * kWarpgroupRowBytes;
        AddToken(token, rows, unit_values, is_apart ? Block::kApartPanelBytes : Block::kPanelBytes, sums);
      }
    }
  }

 private:
  template <typename T>
  static __device__ __forceinline__ DevicePtr<T> Shared(int at) {
    return ViewAs<T>(DynamicShared<uint8_t>() + at);
  }
  __device__ __forceinline__ bool IsTreeUnit(int first) const {
    return tile_.is_tree && first + kUnitKeys > tile_.num_before;
  }

  __device__ __forceinline__ void ScoreToken(int unit, int token, int place, const Queries& queries,
                                             float (*scores)[4]) const {
    float found[kUnitTiles][4] = {};
    const auto rows = DevicePtr<const uint8_t>(Shared<uint8_t>(Block::kApartAt));
    BeginWarpgroupProducts<4 * kUnitTiles>(found[0]);
#pragma unroll
    for (int step = 0; step < Queries::kSteps; ++step) {
      const int at = step / 2 * Block::kApartPanelBytes + place * kUnitKeys * kWarpgroupRowBytes;
      AddWarpgroupProduct<Bf16Products, kUnitKeys>(found[0], queries.words[step], rows + at, step % 2);
    }
    WaitForWarpgroupProducts<4 * kUnitTiles>(found[0]);
#pragma unroll
    for (int i = 0; i < 4 * kUnitTiles; ++i) {
      float factor = 1.0f;
      if constexpr (Block::kIsStaged)
        factor = Shared<float>(Block::kApartScalesAt)[place * kUnitKeys + OwnColumn(i / 4) + i % 2];
      if (IsRowOf(shape_, own_, token, i % 4)) found[i / 4][i % 4] *= factor;
#pragma unroll
      for (int other = 0; other < kUnits; ++other) {
        float& score = scores[other * kUnitTiles + i / 4][i % 4];
        if (other == unit && IsRowOf(shape_, own_, token, i % 4)) score = found[i / 4][i % 4];
      }
    }
  }

  // A panel at a time, since both what there was and what comes are in registers.
  __device__ __forceinline__ void AddToken(int token, uint32_t* weights, DevicePtr<const uint8_t> values,
                                           int panel_bytes, float (*sums)[4]) const {
    constexpr int kTiles = kPanelColumns / kMatrixColumns;
#pragma unroll
    for (int panel = 0; panel < Block::kColumnTiles / kTiles; ++panel) {
      float (*const own)[4] = sums + panel * kTiles;
      float added[kTiles][4];
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) added[i / 4][i % 4] = own[i / 4][i % 4];
      HoldWords<4>(weights);
      BeginWarpgroupProducts<4 * kTiles>(added[0]);
      AddWarpgroupColumns<Bf16Products, kPanelColumns, Block::kPanelBytes>(added[0], weights,
                                                                           values + panel * panel_bytes);
      WaitForWarpgroupProducts<4 * kTiles>(added[0]);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        if (IsRowOf(shape_, own_, token, i % 4)) own[i / 4][i % 4] = added[i / 4][i % 4];
      }
    }
  }

  // What this new token and the next see of a unit, as products take it; zeros where that is nothing.
  template <bool kValues>
  __device__ void Fetch(int first, int token) const {
    constexpr int kElements = kValues ? Block::kColumns : Block::kHead;
    constexpr int kBytes = sizeof(Cached);
    constexpr int kChunks = kElements * kBytes / kChunkBytes;
    const DevicePtr<int64_t> indexes = Shared<int64_t>(Block::kApartIndexesAt);
    const DevicePtr<float> scales = Shared<float>(Block::kApartScalesAt);
    __syncthreads();  // no thread still multiplies what was fetched before
    if (threadIdx.x < kApartRows) {
      const int row = threadIdx.x;
      const int of = token + row / kUnitKeys;
      const int64_t index =
          of <= tile_.LastToken(shape_) ? UnitKeys(shape_, a_, tile_, first, of).Index(row % kUnitKeys) : int64_t{-1};
      indexes[row] = index;
      if constexpr (Block::kIsStaged) {
        const DevicePtr<const float> from = kValues ? a_.v_scale : a_.k_scale;
        scales[row] = index < 0 ? 0.0f : static_cast<float>(from[index]);
      }
    }
    __syncthreads();
    const DevicePtr<const uint8_t> from = kValues ? a_.v + tile_.first_column * kBytes : a_.k;
    const int num_chunks = (kValues ? tile_.num_columns : shape_.cache.head_dim) * kBytes / kChunkBytes;
    const DevicePtr<uint8_t> to = Shared<uint8_t>(Block::kApartAt);
#pragma unroll 1
    for (int i = threadIdx.x; i < kApartRows * kChunks; i += Block::kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int64_t index = indexes[row];
      uint4 words[2] = {};
      if (index >= 0 && chunk < num_chunks) {
        const int64_t at = index * shape_.cache.head_dim * kBytes + chunk * kChunkBytes;
        words[0] = ViewAs<const uint4>(from + at)[0];
      }
      if constexpr (Block::kIsStaged) {
        WordsOf<Cached, kValues>(uint4{words[0]}, kValues ? static_cast<float>(scales[row]) : 1.0f, words);
        ViewAs<uint4>(to + PlaceOfChunk(kApartRows, row, 2 * chunk))[0] = words[0];
        ViewAs<uint4>(to + PlaceOfChunk(kApartRows, row, 2 * chunk + 1))[0] = words[1];
      } else {
        ViewAs<uint4>(to + PlaceOfChunk(kApartRows, row, chunk))[0] = words[0];
      }
    }
    FenceCopies();
    __syncthreads();
  }

  const AttentionShape& shape_;
  const AttentionArrays& a_;
  const TilePlace& tile_;
  const TilePlace& own_;
};

}  // namespace fdsd::cuda
