#pragma once
// A unit of a panel of the formats with groups, as it is multiplied: codes, and scales and minima as floats.
#include "linear_codes.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr int kMaxGroups = kQuantGroup / 16;

struct Unit {
  const uint8_t* codes;  // those of the panel, or `unpacked`
  const uint8_t* highs;  // upper bits of the panel's
  alignas(64) uint8_t unpacked[kWint8Bytes];
  alignas(64) float scales[kMaxGroups][kPanelColumns];
  alignas(64) float minima[kMaxGroups][kPanelColumns];
};

// Half [32], then int8 [groups][32]: their products, times `sign`.
FDSD_INLINE const uint8_t* ReadSteps(const uint8_t* from, int num_groups, float sign, float (*out)[kPanelColumns]) {
  const uint8_t* factors = from + kPanelColumns * 2;
  for (int v = 0; v < kPanelVectors; ++v) {
    const F32x16 step = Mul(LoadHalves(from + v * kLanes * 2), Set1(sign));
    for (int g = 0; g < num_groups; ++g) {
      Store(Mul(step, LoadInt8(factors + g * kPanelColumns + v * kLanes)), out[g] + v * kLanes);
    }
  }
  return factors + num_groups * kPanelColumns;
}

FDSD_INLINE const uint8_t* ReadHalves(const uint8_t* from, int num_groups, float (*out)[kPanelColumns]) {
  for (int i = 0; i < num_groups * kPanelColumns; i += kLanes) Store(LoadHalves(from + i * 2), out[0] + i);
  return from + num_groups * kPanelColumns * 2;
}

template <GroupFormat kGroups>
FDSD_INLINE void ReadScales(const uint8_t* from, Unit* to) {
  constexpr int kNum = kGroups.num_groups();
  if constexpr (kGroups.scale == GroupScale::kSteps) {
    from = ReadSteps(from, kNum, 1.0f, to->scales);
  } else if constexpr (kGroups.scale == GroupScale::kHalf) {
    from = ReadHalves(from, kNum, to->scales);
  } else {
    std::memcpy(to->scales, from, kNum * sizeof(to->scales[0]));
    from += kNum * sizeof(to->scales[0]);
  }
  if constexpr (kGroups.minimum == GroupMinimum::kSteps) {
    ReadSteps(from, kNum, -1.0f, to->minima);
  } else if constexpr (kGroups.minimum == GroupMinimum::kHalf) {
    ReadHalves(from, kNum, to->minima);
  } else if constexpr (kGroups.minimum == GroupMinimum::kFloat) {
    std::memcpy(to->minima, from, kNum * sizeof(to->minima[0]));
  } else if constexpr (kGroups.minimum == GroupMinimum::kZeros) {
    for (int i = 0; i < kNum * kPanelColumns; i += kLanes) {
      Store(Mul(Mul(Load(to->scales[0] + i), LoadInt8(from + i)), Set1(-1.0f)), to->minima[0] + i);
    }
  }
}

// Weights to ask for, so many lines at a time: all at once would hold up other loads.
struct Asked {
  const uint8_t* next;
  const uint8_t* end;
  int lines;

  FDSD_INLINE void Ask() {
    for (int line = 0; line < lines && next < end; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};
constexpr int kReadAsks = 4;  // for the next unit, while one is unpacked

// store(codes of a vector, out): codes a byte each, [32][32][4].
template <int kBits, typename StoreVector>
FDSD_INLINE void EachCodes(const uint8_t* codes, Asked* asked, uint8_t* out, StoreVector&& store) {
  constexpr bool kHasHighs = kBits == 5 || kBits == 6;
  constexpr int kSharing = kHasHighs ? kHighSteps<kBits - 4> : kGroupSteps;
  constexpr int kUnrolled = kGroupSteps / kReadAsks;
  static_assert(!kHasHighs || kUnrolled % kSharing == 0);
  const uint8_t* highs = codes + kWint4Bytes;
  for (int part = 0; part < kReadAsks; ++part) {
    asked->Ask();
#pragma GCC unroll 8
    for (int step = 0; step < kUnrolled; ++step) {
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v, out += kLanes * 4) {
        store(LoadCodes<kBits>(codes, highs, step % kSharing, v), out);
      }
      codes += kPanelColumns * (kBits == 8 ? 4 : 2);
      if (kHasHighs && step % kSharing == kSharing - 1) highs += kPanelColumns * 4;
    }
  }
}

// The unit at `from`; codes of fewer than 8 bits remain as they are if kIsPacked.
template <GroupFormat kGroups, bool kIsPacked>
void ReadUnit(const uint8_t* from, Asked* asked, Unit* to) {
  to->codes = from;
  to->highs = from + kWint4Bytes;
  if constexpr (kGroups.bits < 8 && !kIsPacked) {
    EachCodes<kGroups.bits>(from, asked, to->unpacked, StoreCodes);
    to->codes = to->unpacked;
  } else if constexpr (!kIsPacked) {
    for (int i = 0; i < kReadAsks; ++i) asked->Ask();
  }
  ReadScales<kGroups>(from + kGroups.code_bytes(), to);
}

// A unit of wint4, whose codes become int8: one group.
inline void UnpackWint4(const uint8_t* from, Asked* asked, Unit* to) {
  for (int part = 0; part < kReadAsks; ++part) asked->Ask();
  UnpackInt8Codes(from, to->unpacked);
  to->codes = to->unpacked;
  std::memcpy(to->scales[0], from + kWint4Bytes + kFactorBytes, kScaleBytes);
}

}  // namespace
}  // namespace FDSD_ISA
}  // namespace fdsd
