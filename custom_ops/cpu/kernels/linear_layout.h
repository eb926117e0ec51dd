#pragma once
// The packed form of a weight matrix, the same on every instruction-set level.
//
// Outputs are stored in panels of 32 columns, zero padded, and a panel holds its inputs in order (K-major). One *step*
// is what a column contributes to one dot-product instruction: 4 bytes, i.e. 1 float32, 2 bfloat16 or 4 int8 inputs.
//   float32  [N / 32][K][32]
//   bf16     [N / 32][K / 2][32][2]
//   wint8    [N / 32][K / 128]{ u8 [32][32][4] = w + 128,                          float scale [32] }
//   fp8, e4m3  [N / 32][K / 128]{ e4m3 [32][32][4],              float scale [32] }
//   wint4    [N / 32][K / 128]{ u8 [32][16][4], low nibble: column j, high: j + 16, u8 [8][32], float scale [32] }
// A byte of wint4's second array is of 16 inputs, with a factor of up to 15 in the low nibble, a zero in the high one.
// They make w = factor * (nibble - zero), which is at most 127 in magnitude for any nibble.
// and the formats of linear_grouped.h.
// Where the sum over K has slices, a panel holds one after the other, each as a matrix of its inputs alone would: the
// same bytes as without slices where they begin at multiples of 128.
#include <cstdint>

#include "fdsd/linear.h"

namespace fdsd {

// Raised whenever PackLinear would write other bytes for the same matrix: files of packed weights carry it.
constexpr int32_t kPackedLayoutVersion = 2;

constexpr int kPanelColumns = 32;
constexpr int kWint8ZeroPoint = 128;
constexpr int kStepBytes = 4;
constexpr int kGroupSteps = kQuantGroup / 4;                  // steps of a group in the int formats
constexpr int kScaleBytes = kPanelColumns * sizeof(float);    // scales of one group of a panel
constexpr int kWint8Bytes = kGroupSteps * kPanelColumns * 4;  // integers of one group of a panel
constexpr int kWint4Bytes = kWint8Bytes / 2;
constexpr int kFactorInputs = 16;  // that share a byte of factor and zero in wint4
constexpr int kFactorGroups = kQuantGroup / kFactorInputs;
constexpr int kFactorBytes = kFactorGroups * kPanelColumns;

// Whether values have a scale per group. Always inlined: an out-of-line copy would be shared by files compiled for
// different processors.
__attribute__((always_inline)) constexpr bool IsQuantized(LinearFormat format) {
  return format == LinearFormat::kWint8 || format == LinearFormat::kWint4 || format == LinearFormat::kFp8 ||
         format >= LinearFormat::kE4m3;
}
__attribute__((always_inline)) constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `index` of `count` (1, 2 or 4) parts begins when 0..size is halved again and again at multiples of
// `unit`; index = count is the end.
int64_t HalvingBorder(int64_t size, int32_t count, int64_t unit, int32_t index);

// The inputs of a matrix in slices, and the dot-product units they make: steps of the float formats, groups of the int
// formats.
struct Slices {
  int32_t count;
  int32_t inputs[kMaxSlices + 1];  // slice s has inputs [inputs[s], inputs[s + 1])
  int32_t units[kMaxSlices + 1];   // and units [units[s], units[s + 1])

  __attribute__((always_inline)) int32_t num_units() const { return units[count]; }
};
Slices SlicesOf(int32_t in_features, LinearFormat format, SliceRule rule);

// Bytes of one unit of a panel, and of all.
int64_t PanelUnitBytes(LinearFormat format);
int64_t PanelBytes(const Slices& slices, LinearFormat format);

// What PackLinear, Linear and MoeFfn all require of a matrix; and what processors multiply besides.
Error CheckLinear(int32_t in_features, int32_t out_features, LinearFormat format, SliceRule slices, const void* packed);
Error CheckProcessorFormat(LinearFormat format);

}  // namespace fdsd
