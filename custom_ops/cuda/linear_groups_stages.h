#pragma once
// How integers with a scale per group are multiplied from shared memory. A stage is half a unit of each panel, its
// planes in the unit's order: codes and scales of 64 inputs, all that is common to a unit, and the rows with their
// scales. Sums of groups are exact, and are scaled and added in their order.
#include "linear_groups.h"
#include "linear_pipeline.h"

namespace fdsd::cuda {

// The weights of any such format; GroupLayout says which.
struct GroupedWeights {
  static constexpr LinearFormat kFormat = LinearFormat::kQ4Of0;
  static constexpr bool kIsScaled = true;
  static constexpr bool kIsGrouped = true;
  static constexpr int kPieceStages = kGroupStages;
  using Sum = int32_t;

  static __device__ __forceinline__ int Column(int n, int h, int j) { return Wint4Weights::Column(n, h, j); }
};

// As StageRing, of stages whose size the format gives.
template <int kPanels, int kRows, int kThreads>
class GroupedRing {
 public:
  static __host__ __device__ __forceinline__ int32_t Bytes(int num_stages, const GroupLayout& groups) {
    return num_stages * StageBytes(groups);
  }

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
    const DevicePtr<const uint8_t> stage = memory_ + slot_ * StageBytes(source.groups);
    slot_ = slot_ == num_stages_ - 1 ? 0 : slot_ + 1;
    return stage;
  }

 private:
  static __host__ __device__ __forceinline__ int32_t StageBytes(const GroupLayout& groups) {
    return kPanels * groups.stage_bytes() + kRows * (kStageRowBytes + int32_t{sizeof(GroupScale)});
  }

  __device__ __forceinline__ void Fill(const StageSource& source, int slot) {
    if (next_.HasStage(source.slices)) {
      const DevicePtr<uint8_t> stage = memory_ + slot * StageBytes(source.groups);
      CopyPanels(source, stage);
      const DevicePtr<uint8_t> rows = stage + kPanels * source.groups.stage_bytes();
      const int thread = static_cast<int>(threadIdx.x) % kThreads;
      CopyStageRows<kRows, kThreads>(source, next_.stage, source.num_rows, thread, rows);
      CopyRowScales<kRows, kThreads>(source, next_.stage, source.num_rows, thread, rows + kRows * kStageRowBytes);
      next_.Advance(source.slices);
    }
    CommitCopies();
  }

  __device__ __forceinline__ void CopyPanels(const StageSource& source, DevicePtr<uint8_t> to) const {
    const GroupLayout& groups = source.groups;
    const int32_t panel_chunks = groups.stage_bytes() / kChunkBytes;
    const int64_t unit = next_.stage / kGroupStages * int64_t{groups.unit_bytes()};
    const int half = next_.stage % kGroupStages;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const DevicePtr<const uint8_t> from = source.panels + (panel * source.panel_bytes + unit);
#pragma unroll 1
      for (int chunk = static_cast<int>(threadIdx.x) % kThreads; chunk < panel_chunks; chunk += kThreads) {
        const int32_t place = PlaceOf(groups, chunk) * kChunkBytes;
        CopyAsync<kChunkBytes>(to + (panel * groups.stage_bytes() + place),
                               from + OffsetOf(groups, half, chunk * kChunkBytes), panel < source.num_panels);
      }
    }
  }

  // Where in a unit a byte of one of its halves is.
  static __device__ __forceinline__ int32_t OffsetOf(const GroupLayout& groups, int half, int32_t at) {
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
  static __device__ __forceinline__ int32_t PlaceOf(const GroupLayout& groups, int32_t chunk) {
    if (chunk * kChunkBytes >= groups.stage[1]) return chunk;
    return groups.bits == 8 ? chunk ^ ((chunk / 8 & 3) << 1) : chunk ^ (chunk / 4 & 2);
  }

  DevicePtr<uint8_t> memory_;
  int num_stages_;
  StageWalk next_;  // the stage to copy next
  int slot_ = 0;    // where the stage to multiply next lies
};

// The lane's codes of step `step` of a stage, the first operand of its products.
__device__ __forceinline__ void LoadCodes(const GroupLayout& groups, DevicePtr<const uint8_t> stage, int step,
                                          uint32_t (*a)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int j = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = step * kMatrixWords + half * (kMatrixWords / 2) + t;
    uint32_t words[kPanelProducts][2];
    if (groups.bits == 8) {
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
    if (groups.bits == 5 || groups.bits == 6) {
      const int num_bits = groups.bits - 4;
      const int sharing = 8 / num_bits;
#pragma unroll
      for (int n = 0; n < kPanelProducts; ++n) {
        const auto shared = ViewAs<const uint2>(stage + groups.stage[1]);
        const uint2 own = shared[(line / sharing * kPanelColumns + Wint4Weights::Column(n, 0, j)) / 2];
        words[n][0] |= HighBits(own.x, line % sharing, num_bits);
        words[n][1] |= HighBits(own.y, line % sharing, num_bits);
      }
    }
#pragma unroll
    for (int n = 0; n < kPanelProducts; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) a[n][2 * half + h] = SignedCodes(words[n][h], static_cast<uint32_t>(groups.zero));
    }
  }
}

// Exact sums of a group: codes . rows, and of the rows' integers.
template <int kRowTiles>
struct GroupSums {
  int32_t dots[kRowTiles][kPanelProducts][4];
  int32_t inputs[kRowTiles][4];
};

// sums += what scales and minima make of a group's.
template <int kRowTiles>
__device__ __forceinline__ void AddGroup(const GroupLayout& groups, DevicePtr<const uint8_t> stage, int group,
                                         DevicePtr<const GroupScale> row_scales, const GroupSums<kRowTiles>& group_sums,
                                         Products<float, kRowTiles>* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool has_minima = groups.minimum != FactorKind::kNone;
  float scales[kPanelProducts][2];
  float minima[kPanelProducts][2] = {};
#pragma unroll
  for (int n = 0; n < kPanelProducts; ++n) {
    const int column = GroupedWeights::Column(n, 0, lane / 4);
    const FactorPair own = FactorsOf(groups.scale, stage + groups.stage[kScalePlane], group, column);
    scales[n][0] = own.low;
    scales[n][1] = own.high;
    if (!has_minima) continue;
    const FactorPair least = MinimaOf(groups.minimum, stage + groups.stage[kMinimumPlane], group, column, own);
    minima[n][0] = least.low;
    minima[n][1] = least.high;
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    const uint4 two = ViewAs<const uint4>(row_scales + (tile * kMatrixColumns + 2 * (lane % 4)))[0];
    const float x_scales[2] = {__uint_as_float(two.x), __uint_as_float(two.z)};
#pragma unroll
    for (int i = 0; i < kPanelProducts * 4; ++i) {
      const int n = i / 4;
      const float x_scale = x_scales[i % 2];
      float& sum = sums->values[tile][n][i % 4];
      sum = fmaf(static_cast<float>(group_sums.dots[tile][n][i % 4]), scales[n][i % 4 / 2] * x_scale, sum);
      if (has_minima)
        sum = fmaf(minima[n][i % 4 / 2], x_scale * static_cast<float>(group_sums.inputs[tile][i % 4]), sum);
    }
  }
}

// group_sums += codes . rows of x, of a step, and ones . rows.
template <int kRowTiles>
__device__ __forceinline__ void AddCodes(const uint32_t (*codes)[4], const uint32_t* ones, bool has_minima,
                                         DevicePtr<const uint8_t> rows, int step, GroupSums<kRowTiles>* group_sums) {
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
#pragma unroll
      for (int n = 0; n < kPanelProducts; ++n) AddSignedProduct(group_sums->dots[first + tile][n], codes[n], b[tile]);
      if (has_minima) AddSignedProduct(group_sums->inputs[first + tile], ones, b[tile]);
    }
  }
}

// sums += the products of a ring's next piece, a unit.
template <typename Weights, int kRowTiles, int kPanels, int kRows, int kThreads>
__device__ __forceinline__ void AddPiece(GroupedRing<kPanels, kRows, kThreads>* ring, const StageSource& source,
                                         const WarpShare& share, Products<float, kRowTiles, kPanelProducts>* sums) {
  const GroupLayout& groups = source.groups;
  const bool has_minima = groups.minimum != FactorKind::kNone;
  // A group of 16 inputs has half of a step, the codes of the other half being left out.
  const int part_words = groups.group_words < kMatrixWords ? groups.group_words : kMatrixWords;
  GroupSums<kRowTiles> group_sums = {};
#pragma unroll 1
  for (int i = 0; i < kGroupStages; ++i) {
    const DevicePtr<const uint8_t> all = ring->Next(source);
    const DevicePtr<const uint8_t> stage = all + share.panel * groups.stage_bytes();
    const DevicePtr<const uint8_t> rows = all + (kPanels * groups.stage_bytes() + share.row * kStageRowBytes);
    const auto row_scales =
        ViewAs<const GroupScale>(all + (kPanels * groups.stage_bytes() + kRows * kStageRowBytes)) + share.row;
#pragma unroll 1
    for (int begin = 0; begin < kStageWords; begin += part_words) {
      const int step = begin / kMatrixWords;
      uint32_t codes[kPanelProducts][4];
      LoadCodes(groups, stage, step, codes);
      uint32_t ones[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const bool is_own = part_words == kMatrixWords || begin % kMatrixWords / part_words == w / 2;
        ones[w] = is_own ? 0x01010101u : 0;
#pragma unroll
        for (int n = 0; n < kPanelProducts; ++n) codes[n][w] = is_own ? codes[n][w] : 0;
      }
      AddCodes<kRowTiles>(codes, ones, has_minima, rows, step, &group_sums);
      if ((i * kStageWords + begin + part_words) % groups.group_words != 0) continue;
      AddGroup<kRowTiles>(groups, stage, begin / groups.group_words, row_scales, group_sums, sums);
      group_sums = {};
    }
  }
}

}  // namespace fdsd::cuda
