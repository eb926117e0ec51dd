// Packs integers with groups, of which the caller has their scales and minima in order.
#include <algorithm>
#include <cstring>

#include "fdsd/linear.h"
#include "linear_grouped.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr uint32_t kOnes = 0x01010101u;

// Four codes of a unit's column as they are stored, padding after the last input.
uint32_t StoredCodes(const int8_t* codes, int count, int32_t zero, uint32_t padding) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = i < count ? static_cast<uint32_t>((codes[i] + zero) & 0xff) : padding;
    word |= code << (8 * i);
  }
  return word;
}

// Adds a column's codes to those of a unit, which begins as padding.
void PackColumn(const GroupFormat& format, uint32_t padding, const int8_t* codes, int num_inputs, int column,
                uint32_t* words) {
  constexpr int kHalf = kPanelColumns / 2;
  const int high_bits = format.bits - 4;
  const int sharing = format.bits == 8 || format.bits == 4 ? 1 : 8 / high_bits;
  for (int step = 0; step * 4 < num_inputs; ++step) {
    const uint32_t word = StoredCodes(codes + 4 * step, num_inputs - 4 * step, format.zero, padding);
    if (format.bits == 8) {
      words[step * kPanelColumns + column] = word;
      continue;
    }
    words[step * kHalf + column % kHalf] |= (word & 15 * kOnes) << (column < kHalf ? 0 : 4);
    if (format.bits == 4) continue;
    const uint32_t high = word >> 4 & ((1u << high_bits) - 1) * kOnes;
    words[kWint4Bytes / 4 + step / sharing * kPanelColumns + column] |= high << (step % sharing * high_bits + 4) % 8;
  }
}

}  // namespace

Error PackIntegers(const PackIntegersParams& p) {
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  const GroupFormat format = CodeFormatOf(p.format);
  const uint32_t padding = PaddingOf(p.format);
  if (format.bits == 0) return "format: expected one of integers, got another";
  const Slices slices = SlicesOf(p.in_features, p.format, p.slices);
  const int64_t code_bytes = format.code_bytes();
  const int64_t factor_bytes = format.unit_bytes() - code_bytes;
  auto* out = static_cast<uint8_t*>(p.packed);
  const uint8_t* factors = p.factors;
  for (int32_t first = 0; first < p.out_features; first += kPanelColumns) {
    for (int32_t s = 0; s < slices.count; ++s) {
      for (int32_t k = slices.inputs[s]; k < slices.inputs[s + 1]; k += kQuantGroup) {
        alignas(64) uint32_t words[kWint8Bytes / 4];
        std::ranges::fill(words, padding * kOnes);
        const int num_inputs = std::min(kQuantGroup, slices.inputs[s + 1] - k);
        for (int c = 0; c < kPanelColumns && first + c < p.out_features; ++c)
          PackColumn(format, padding, p.codes + int64_t{first + c} * p.in_features + k, num_inputs, c, words);
        std::memcpy(out, words, code_bytes);
        std::memcpy(out + code_bytes, factors, factor_bytes);
        out += code_bytes + factor_bytes;
        factors += factor_bytes;
      }
    }
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
