// Reorders codes with a scale per group into panels, as processors do (linear_pack_integers.cc): the same bytes.
#include "linear_groups.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTileStride = kQuantGroup + 4;  // of a column: a word more, so that neither way of access meets in a bank

// The unit of all slices that is `index`, in order.
struct UnitInputs {
  int32_t first;
  int32_t count;
};
__device__ __forceinline__ UnitInputs InputsOf(const Slices& slices, int32_t index) {
  int s = 0;
  while (s + 1 < slices.count && index >= slices.units[s + 1]) ++s;
  const int32_t first = slices.inputs[s] + (index - slices.units[s]) * kQuantGroup;
  return {first, min(kQuantGroup, slices.inputs[s + 1] - first)};
}

// Block (panel, unit). The tile has a unit's codes as they are stored, padding where the matrix or the slice has ended.
__global__ __launch_bounds__(kThreads) void PackIntegersKernel(const __grid_constant__ Slices slices,
                                                               const __grid_constant__ GroupLayout groups,
                                                               uint8_t padding, int32_t in_features,
                                                               int32_t out_features, DevicePtr<const int8_t> codes,
                                                               DevicePtr<const uint8_t> factors,
                                                               DevicePtr<uint8_t> packed) {
  FDSD_SHARED(uint8_t, tile, kPanelColumns* kTileStride);
  const UnitInputs inputs = InputsOf(slices, static_cast<int32_t>(blockIdx.y));
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kPanelColumns;
  for (int e = threadIdx.x; e < kPanelColumns * kQuantGroup; e += kThreads) {
    const int column = e / kQuantGroup;
    const int input = e % kQuantGroup;
    uint8_t code = padding;
    if (first_column + column < out_features && input < inputs.count) {
      const int64_t at = int64_t{first_column + column} * in_features + inputs.first + input;
      code = static_cast<uint8_t>(codes[at] + groups.zero);
    }
    tile[column * kTileStride + input] = code;
  }
  __syncthreads();
  const auto word = [&](int step, int column) { return ViewAs<const uint32_t>(tile + column * kTileStride)[step]; };
  const int64_t unit = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  const DevicePtr<uint8_t> out = packed + unit * groups.unit_bytes();
  const DevicePtr<uint32_t> words = ViewAs<uint32_t>(out);
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  constexpr int kHalf = kPanelColumns / 2;
  const int code_words = groups.unit[1] / 4;
  for (int w = threadIdx.x; w < code_words; w += kThreads) {
    words[w] = groups.bits == 8
                   ? word(w / kPanelColumns, w % kPanelColumns)
                   : (word(w / kHalf, w % kHalf) & kLow) | (word(w / kHalf, w % kHalf + kHalf) & kLow) << 4;
  }
  const int high_bits = groups.bits - 4;
  const int sharing = groups.unit[1] == groups.unit[2] ? 1 : 8 / high_bits;
  for (int w = code_words + static_cast<int>(threadIdx.x); w < groups.unit[2] / 4; w += kThreads) {
    const int line = (w - code_words) / kPanelColumns;
    uint32_t shared = 0;
    for (int i = 0; i < sharing; ++i) {
      const uint32_t high = word(line * sharing + i, w % kPanelColumns) >> 4 & HighMask(high_bits);
      shared |= high << (i * high_bits + 4) % 8;
    }
    words[w] = shared;
  }
  const int32_t factor_bytes = groups.unit_bytes() - groups.unit[2];
  const DevicePtr<const uint32_t> from = ViewAs<const uint32_t>(factors + unit * factor_bytes);
  for (int w = threadIdx.x; w < factor_bytes / 4; w += kThreads) words[groups.unit[2] / 4 + w] = from[w];
}

}  // namespace

Error PackIntegers(const PackIntegersParams& p, Stream stream) {
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  const GroupLayout groups = LayoutOf(CodeFormatOf(p.format));
  if (groups.bits == 0) return "format: expected one of integers, got another";
  const Slices slices = SlicesOf(p.in_features, p.format, p.slices);
  const LaunchShape shape{
      dim3(static_cast<unsigned>(DivideUp(p.out_features, kPanelColumns)), static_cast<unsigned>(slices.num_units())),
      dim3(kThreads)};
  return Launch<PackIntegersKernel>(shape, stream, slices, groups, static_cast<uint8_t>(PaddingOf(p.format)),
                                    p.in_features, p.out_features, DevicePtr<const int8_t>(p.codes),
                                    DevicePtr<const uint8_t>(p.factors), DevicePtr<uint8_t>(p.packed));
}

}  // namespace fdsd::cuda
