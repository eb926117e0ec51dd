#pragma once
// How integers with a scale per group are multiplied from shared memory. A stage is half a unit of each panel, its
// planes in the unit's order: codes and scales of 64 inputs, all that is common to a unit, and the rows with their
// scales. Sums of groups are exact, and are scaled and added in their order.
#include "linear_groups.h"
#include "linear_pipeline.h"

namespace fdsd::cuda {

template <int32_t format>
struct GroupedWeights {
  static constexpr auto kFormat = static_cast<LinearFormat>(format);
  static constexpr GroupLayout kGroups = GroupLayoutOf(kFormat);
  static constexpr int64_t kUnitBytes = kGroups.unit_bytes();
  static constexpr bool kIsScaled = true;
  static constexpr bool kIsGrouped = true;
  static constexpr int kPieceStages = kGroupStages;
  using Sum = int32_t;

  static __device__ __forceinline__ int Column(int n, int h, int j) { return Wint4Weights::Column(n, h, j); }
};

// As StageRing.
template <typename Weights, int kPanels, int kRows, int kThreads>
class GroupedRing {
 public:
  static constexpr int kPanelBytes = Weights::kGroups.stage_bytes();
  static constexpr int kRowsAt = kPanels * kPanelBytes;
  static constexpr int kRowScalesAt = kRowsAt + kRows * kStageRowBytes;
  static constexpr int kStageBytes = kRowScalesAt + kRows * int{sizeof(GroupScale)};

  static __host__ __device__ __forceinline__ constexpr int Bytes(int num_stages) { return num_stages * kStageBytes; }

  __device__ __forceinline__ GroupedRing(DevicePtr<uint8_t> memory, int num_stages, const StageSource& source,
                                         const StageWalk& walk)
      : memory_(memory), num_stages_(num_stages), next_(walk) {
#pragma unroll 1
    for (int slot = 0; slot < num_stages_ - 1; ++slot) Fill(source, slot);
  }

  // The next stage, once it is there. Until the next call.
  __device__ __forceinline__ DevicePtr<const uint8_t> Next(const StageSource& source) {
    WaitForStage<1>(num_stages_);
    MeetThreads<kThreads>();
    Fill(source, slot_ == 0 ? num_stages_ - 1 : slot_ - 1);
    const DevicePtr<const uint8_t> stage = memory_ + slot_ * kStageBytes;
    slot_ = slot_ == num_stages_ - 1 ? 0 : slot_ + 1;
    return stage;
  }

 private:
  __device__ __forceinline__ void Fill(const StageSource& source, int slot) {
    if (next_.HasStage(source.slices)) {
      const DevicePtr<uint8_t> stage = memory_ + slot * kStageBytes;
      CopyPanels(source, stage);
      const int thread = static_cast<int>(threadIdx.x) % kThreads;
      CopyStageRows<kRows, kThreads>(source, next_.stage, source.num_rows, thread, stage + kRowsAt);
      CopyRowScales<kRows, kThreads>(source, next_.stage, source.num_rows, thread, stage + kRowScalesAt);
      next_.Advance(source.slices);
    }
    CommitCopies();
  }

  __device__ __forceinline__ void CopyPanels(const StageSource& source, DevicePtr<uint8_t> to) const {
    constexpr int kPanelChunks = kPanelBytes / kChunkBytes;
    const int64_t unit = next_.stage / kGroupStages * Weights::kUnitBytes;
    const int half = next_.stage % kGroupStages;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const DevicePtr<const uint8_t> from = source.panels + (panel * source.panel_bytes + unit);
#pragma unroll 1
      for (int chunk = static_cast<int>(threadIdx.x) % kThreads; chunk < kPanelChunks; chunk += kThreads) {
        const int32_t place = PlaceOf(chunk) * kChunkBytes;
        CopyAsync<kChunkBytes>(to + (panel * kPanelBytes + place), from + OffsetOf(half, chunk * kChunkBytes),
                               panel < source.num_panels);
      }
    }
  }

  // Where in a unit a byte of one of its halves is.
  static __device__ __forceinline__ int32_t OffsetOf(int half, int32_t at) {
    constexpr GroupLayout groups = Weights::kGroups;
    int32_t offset = 0;
#pragma unroll
    for (int plane = 0; plane < kNumPlanes; ++plane) {
      const int32_t begin = groups.stage[plane];
      if (at < begin) continue;
      const int32_t own_bytes = groups.stage[plane + 1] - begin;
      const int32_t second = groups.unit[plane + 1] - groups.unit[plane] - own_bytes;
      const bool has_steps = (plane == kScalePlane && groups.scale == FactorKind::kSteps) ||
                             (plane == kMinimumPlane && groups.minimum == FactorKind::kSteps);
      const bool is_common = has_steps && at - begin < kStepPlaneBytes;
      offset = groups.unit[plane] + at - begin + (is_common ? 0 : half * second);
    }
    return offset;
  }

  // Lines of codes have their chunks in another order, such that no two lanes that read at once meet in a bank.
  static __device__ __forceinline__ int32_t PlaceOf(int32_t chunk) {
    constexpr GroupLayout groups = Weights::kGroups;
    if (chunk * kChunkBytes >= groups.stage[1]) return chunk;
    return groups.bits == 8 ? chunk ^ ((chunk / 8 & 3) << 1) : chunk ^ (chunk / 4 & 2);
  }

  DevicePtr<uint8_t> memory_;
  int num_stages_;
  StageWalk next_;  // the stage to copy next
  int slot_ = 0;    // where the stage to multiply next lies
};

// The lane's codes of step `step` of a stage, the first operand of its products.
template <typename Weights>
__device__ __forceinline__ void LoadCodes(DevicePtr<const uint8_t> stage, int step, uint32_t (*a)[4]) {
  constexpr GroupLayout groups = Weights::kGroups;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int j = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = step * kMatrixWords + half * (kMatrixWords / 2) + t;
    uint32_t words[kPanelProducts][2];
    if constexpr (groups.bits == 8) {
      constexpr int kLineBytes = kPanelColumns * kStepBytes;
#pragma unroll
      for (int n = 0; n < kPanelProducts; ++n) {
        const int chunk = (4 * n + j / 2) ^ (t << 1);
        const uint2 own = ViewAs<const uint2>(stage + line * kLineBytes)[2 * chunk + j % 2];
        words[n][0] = own.x;
        words[n][1] = own.y;
      }
    } else {
      Wint4Weights::Load(stage, line, j, words);
    }
    if constexpr (groups.bits == 5 || groups.bits == 6) {
      constexpr int kNumBits = groups.bits - 4;
      constexpr int kSharing = 8 / kNumBits;
#pragma unroll
      for (int n = 0; n < kPanelProducts; ++n) {
        const auto shared = ViewAs<const uint2>(stage + groups.stage[1]);
        const uint2 own = shared[(line / kSharing * kPanelColumns + Wint4Weights::Column(n, 0, j)) / 2];
        words[n][0] |= HighBits(own.x, line % kSharing, kNumBits);
        words[n][1] |= HighBits(own.y, line % kSharing, kNumBits);
      }
    }
#pragma unroll
    for (int n = 0; n < kPanelProducts; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) a[n][2 * half + h] = SignedCodes(words[n][h], groups.zero);
    }
  }
}

// Exact sums of a group: codes . rows, and of the rows' integers. They begin at the bits of 1.5 * 2^23, so with a sum
// below 2^22 they are those of the float that is so much larger.
constexpr int32_t kEmptySum = 0x4b400000;
__device__ __forceinline__ float SumOf(int32_t sum) { return __uint_as_float(static_cast<uint32_t>(sum)) - 0x1.8p23f; }

template <int kRowTiles>
struct GroupSums {
  int32_t dots[kRowTiles][kPanelProducts][4];
  int32_t inputs[kRowTiles][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles * kPanelProducts * 4; ++i)
      dots[i / 4 / kPanelProducts][i / 4 % kPanelProducts][i % 4] = kEmptySum;
#pragma unroll
    for (int i = 0; i < kRowTiles * 4; ++i) inputs[i / 4][i % 4] = kEmptySum;
  }
};

// sums += what scales and minima make of a group's.
template <typename Weights, int kRowTiles>
__device__ __forceinline__ void AddGroup(DevicePtr<const uint8_t> stage, int group,
                                         DevicePtr<const GroupScale> row_scales, const GroupSums<kRowTiles>& group_sums,
                                         Products<float, kRowTiles>* sums) {
  constexpr GroupLayout groups = Weights::kGroups;
  constexpr bool kHasMinima = groups.minimum != FactorKind::kNone;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  FactorPair scales[kPanelProducts];
  FactorPair minima[kPanelProducts];
#pragma unroll
  for (int n = 0; n < kPanelProducts; ++n) {
    const int column = Weights::Column(n, 0, lane / 4);
    scales[n] = FactorsOf(groups.scale, stage + groups.stage[kScalePlane], group, column);
    minima[n] = MinimaOf(groups.minimum, stage + groups.stage[kMinimumPlane], group, column, scales[n]);
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    const uint4 two = ViewAs<const uint4>(row_scales + (tile * kMatrixColumns + 2 * (lane % 4)))[0];
    const float x_scales[2] = {__uint_as_float(two.x), __uint_as_float(two.z)};
    float x_sums[2] = {};
    if constexpr (kHasMinima) {
#pragma unroll
      for (int i = 0; i < 2; ++i) x_sums[i] = x_scales[i] * SumOf(group_sums.inputs[tile][i]);
    }
#pragma unroll
    for (int i = 0; i < kPanelProducts * 4; ++i) {
      const int n = i / 4;
      const bool is_low = i % 4 < 2;
      float& sum = sums->values[tile][n][i % 4];
      const float scale = (is_low ? scales[n].low : scales[n].high) * x_scales[i % 2];
      sum = fmaf(SumOf(group_sums.dots[tile][n][i % 4]), scale, sum);
      if constexpr (kHasMinima) sum = fmaf(is_low ? minima[n].low : minima[n].high, x_sums[i % 2], sum);
    }
  }
}

// group_sums += codes . rows of x, of a step or of part 0 or 1 of one, and ones . rows.
template <typename Weights, int kRowTiles>
__device__ __forceinline__ void AddCodes(const uint32_t (*codes)[4], DevicePtr<const uint8_t> rows, int step, int part,
                                         GroupSums<kRowTiles>* group_sums) {
  constexpr bool kIsHalf = Weights::kGroups.group_words < kMatrixWords;
  constexpr bool kHasMinima = Weights::kGroups.minimum != FactorKind::kNone;
  constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  constexpr int kTiles = kRowTiles < 2 ? 1 : 2;  // that a load has
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = lane % kMatrixColumns;
  const int matrix = lane / kMatrixColumns;
#pragma unroll
  for (int first = 0; first < kRowTiles; first += kTiles) {
    const int own_row = (first + matrix / 2 % kTiles) * kMatrixColumns + row;
    uint32_t b[2][2];
    LoadRowWords(rows + (own_row * kStageRowBytes + RowPlaceOf(row, 2 * step + matrix % 2) * kChunkBytes), b[0]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto add = [&](int32_t* sums, const uint32_t* a) {
        if constexpr (kIsHalf) {
          AddSignedHalfProduct(sums, a + 2 * part, b[tile][part]);
        } else {
          AddSignedProduct(sums, a, b[tile]);
        }
      };
#pragma unroll
      for (int n = 0; n < kPanelProducts; ++n) add(group_sums->dots[first + tile][n], codes[n]);
      if constexpr (kHasMinima) add(group_sums->inputs[first + tile], kOnes);
    }
  }
}

// sums += the products of a ring's next piece, a unit.
template <typename Weights, int kRowTiles, int kPanels, int kRows, int kThreads>
__device__ __forceinline__ void AddPiece(GroupedRing<Weights, kPanels, kRows, kThreads>* ring,
                                         const StageSource& source, const WarpShare& share,
                                         Products<float, kRowTiles, kPanelProducts>* sums) {
  using Ring = GroupedRing<Weights, kPanels, kRows, kThreads>;
  constexpr int kGroupWords = Weights::kGroups.group_words;
  constexpr int kPartWords = kGroupWords < kMatrixWords ? kGroupWords : kMatrixWords;  // of a product
  // Unrolled, but where registers have no room for so many scales and minima.
  constexpr bool kHasMany = kPartWords < kMatrixWords && Weights::kGroups.minimum != FactorKind::kNone;
  [[maybe_unused]] constexpr int kSteps = kHasMany ? 1 : kStageSteps;
  GroupSums<kRowTiles> group_sums;
  group_sums.Clear();
#pragma unroll 1
  for (int i = 0; i < kGroupStages; ++i) {
    const DevicePtr<const uint8_t> all = ring->Next(source);
    const DevicePtr<const uint8_t> stage = all + share.panel * Ring::kPanelBytes;
    const DevicePtr<const uint8_t> rows = all + (Ring::kRowsAt + share.row * kStageRowBytes);
    const auto row_scales = ViewAs<const GroupScale>(all + Ring::kRowScalesAt) + share.row;
#pragma unroll(kSteps)
    for (int step = 0; step < kStageSteps; ++step) {
      uint32_t codes[kPanelProducts][4];
      LoadCodes<Weights>(stage, step, codes);
#pragma unroll
      for (int part = 0; part < kMatrixWords / kPartWords; ++part) {
        AddCodes<Weights, kRowTiles>(codes, rows, step, part, &group_sums);
        const int word = step * kMatrixWords + part * kPartWords;
        if ((i * kStageWords + word + kPartWords) % kGroupWords != 0) continue;
        AddGroup<Weights, kRowTiles>(stage, word / kGroupWords, row_scales, group_sums, sums);
        group_sums.Clear();
      }
    }
  }
}

}  // namespace fdsd::cuda
