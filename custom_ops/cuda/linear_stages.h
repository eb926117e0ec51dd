#pragma once
// How the sum of a linear layer is cut, whatever the number of rows: into the slices that ranks share
// (linear_layout.h), each slice into kParts parts of neighbouring inputs, a part into pieces. A part's sum grows piece
// by piece. The parts of a slice are added in order, then the slices in their tree. A stage is what is copied to shared
// memory at a time, 64 bytes of a row of x: 32 bfloat16, or half a group of 8-bit integers.
#include "device.h"
#include "linear_layout.h"
#include "numbers.h"

namespace fdsd::cuda {

constexpr int kParts = 8;
constexpr int kStageWords = 16;  // of 4 bytes, of a row of x
constexpr int kStageRowBytes = kStageWords * 4;
// Of a group of 128 inputs, by the bytes that x has of each.
constexpr int kGroupStages = kGroupSteps / kStageWords;
constexpr int kWideGroupStages = 2 * kGroupStages;

// What a kernel needs to know of the slices of a sum. Every slice begins a stage, and a piece.
struct SliceBorders {
  int32_t count;
  int32_t inputs[kMaxSlices + 1];
  int32_t units[kMaxSlices + 1];
  int32_t stages[kMaxSlices + 1];

  __host__ __device__ __forceinline__ int32_t num_stages() const { return stages[count]; }
  // The slice of a stage.
  __device__ __forceinline__ int Of(int32_t stage) const {
    int s = 0;
    while (s + 1 < count && stage >= stages[s + 1]) ++s;
    return s;
  }
  // The stage at which a part of a slice begins; part = kParts: the end of the last.
  __device__ __forceinline__ int32_t PartBegin(int slice, int part, int piece_stages) const {
    const int32_t num_pieces = (stages[slice + 1] - stages[slice]) / piece_stages;
    return stages[slice] + num_pieces * part / kParts * piece_stages;
  }
};

constexpr int GroupStagesOf(LinearFormat format) {
  return format == LinearFormat::kE4m3 ? kWideGroupStages : kGroupStages;
}

inline SliceBorders BordersOf(const Slices& slices, LinearFormat format) {
  SliceBorders borders{slices.count, {}, {}, {}};
  for (int s = 0; s <= slices.count; ++s) {
    borders.inputs[s] = slices.inputs[s];
    borders.units[s] = slices.units[s];
    if (s == 0) continue;
    const int32_t num_units = slices.units[s] - slices.units[s - 1];
    borders.stages[s] =
        borders.stages[s - 1] + (IsQuantized(format) ? num_units * GroupStagesOf(format)
                                                     : static_cast<int32_t>(DivideUp(num_units, kStageWords)));
  }
  return borders;
}

// The stages of some neighbouring parts of every slice, slice by slice.
struct StageWalk {
  int part_begin;
  int part_end;
  int piece_stages;
  int slice;
  int32_t stage;
  int32_t end;

  __device__ __forceinline__ StageWalk(const SliceBorders& slices, int part_begin, int part_end, int piece_stages)
      : part_begin(part_begin), part_end(part_end), piece_stages(piece_stages), slice(-1), stage(0), end(0) {
    FindSlice(slices);
  }
  // Whether there is a stage here.
  __device__ __forceinline__ bool HasStage(const SliceBorders& slices) const { return slice < slices.count; }
  // Whether the sums have it.
  static __device__ __forceinline__ constexpr bool IsThere() { return true; }
  __device__ __forceinline__ void Advance(const SliceBorders& slices) {
    ++stage;
    FindSlice(slices);
  }

 private:
  __device__ __forceinline__ void FindSlice(const SliceBorders& slices) {
    while (stage >= end && ++slice < slices.count) {
      stage = slices.PartBegin(slice, part_begin, piece_stages);
      end = slices.PartBegin(slice, part_end, piece_stages);
    }
  }
};

// Parts that are walked through side by side, so many at a time and in step. Side i has parts kRounds * i, kRounds * i
// + 1, .. of a slice, one a round. Where it has fewer stages than another side, the missing stages add nothing.
constexpr int kPartsInStep = 4;
constexpr int kRounds = kParts / kPartsInStep;

// Stages of a round, those of its longest part.
__device__ __forceinline__ int32_t StagesInStep(const SliceBorders& slices, int slice, int round, int piece_stages) {
  int32_t longest = 0;
#pragma unroll
  for (int part = round; part < kParts; part += kRounds) {
    const int32_t length =
        slices.PartBegin(slice, part + 1, piece_stages) - slices.PartBegin(slice, part, piece_stages);
    longest = length > longest ? length : longest;
  }
  return longest;
}

// The stages of a side, slice by slice.
struct StepWalk {
  int side;
  int piece_stages;
  int slice;
  int round;
  int32_t stage;
  int32_t part_end;
  int32_t end;

  __device__ __forceinline__ StepWalk(const SliceBorders& slices, int side, int piece_stages)
      : side(side), piece_stages(piece_stages), slice(0), round(0), stage(0), part_end(0), end(0) {
    FindPart(slices);
  }
  __device__ __forceinline__ bool HasStage(const SliceBorders& slices) const { return slice < slices.count; }
  __device__ __forceinline__ bool IsThere() const { return stage < part_end; }
  __device__ __forceinline__ void Advance(const SliceBorders& slices) {
    if (++stage < end) return;
    NextRound();
    FindPart(slices);
  }

 private:
  __device__ __forceinline__ void NextRound() {
    if (++round < kRounds) return;
    round = 0;
    ++slice;
  }

  __device__ __forceinline__ void FindPart(const SliceBorders& slices) {
    for (; slice < slices.count; NextRound()) {
      const int32_t num_stages = StagesInStep(slices, slice, round, piece_stages);
      if (num_stages == 0) continue;
      stage = slices.PartBegin(slice, kRounds * side + round, piece_stages);
      part_end = slices.PartBegin(slice, kRounds * side + round + 1, piece_stages);
      end = stage + num_stages;
      return;
    }
  }
};

// The tree of a sum's slices, which are added in their order.
struct SliceTree {
  float left;
  float right;

  __device__ __forceinline__ void Add(int slice, float sum) {
    if (slice == 0) left = sum;
    if (slice == 1) left = left + sum;
    if (slice == 2) right = sum;
    if (slice == 3) right = right + sum;
  }
  __device__ __forceinline__ float Total(int count) const { return count == kMaxSlices ? left + right : left; }
};

}  // namespace fdsd::cuda
