// Packed rows times a panel, on tiles. A sum goes through its slice in the order of K whatever the number of rows; the
// bits of bf16 are this level's own, those of the int formats every level's.
#include "amx/linear_bf16.h"
#include "amx/linear_int.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {
namespace {

template <class Format, bool kBoth>
void MultiplyPacks(const PackedRows& x, const Rows* packs, int64_t num_packs, const uint8_t* panel) {
  int64_t num_steps = 0;
  const auto slice_of = [&](int32_t s) {
    const int32_t first = x.slices.units[s];
    return Slice{s, first, x.slices.units[s + 1] - first, panel + first * PanelUnitBytes(x.format)};
  };
  for (int32_t s = 0; s < x.slices.count; ++s) num_steps += Format::NumSteps(slice_of(s));
  const int32_t measured = PrefetchBytes(x.format, packs[0].count);
  Ahead ahead(panel, PanelBytes(x.slices, x.format), num_packs, num_steps,
              measured == kNotMeasured ? kPrefetchAhead : measured);
  for (int32_t s = 0; s < x.slices.count; ++s) {
    const Slice slice = slice_of(s);
    const int64_t slice_steps = Format::NumSteps(slice);
    const int64_t chunk = num_packs == 1 ? std::max<int64_t>(slice_steps, 1) : Format::kChunkSteps;
    for (int64_t begin = 0; begin < slice_steps; begin += chunk) {
      for (int64_t i = 0; i < num_packs; ++i) {
        float* sums = packs[i].levels + SumLevel(s) * kBlockSums;
        Format::template Multiply<kBoth>(x, packs[i], slice, begin, std::min(begin + chunk, slice_steps), sums, &ahead);
      }
    }
    for (int64_t i = 0; i < num_packs; ++i) {
      if (slice_steps == 0) std::memset(packs[i].levels + SumLevel(s) * kBlockSums, 0, sizeof(float) * kBlockSums);
      EndSlice(s, packs[i]);
    }
  }
}

template <class Format>
void MultiplyPacks(const PackedRows& x, const Rows* packs, int64_t num_packs, const uint8_t* panel) {
  // All packs have the shape of the largest.
  const int most = static_cast<int>(DivideUp(x.num_rows, x.num_tiles));
  const auto a = static_cast<uint8_t>(std::min(most, kTileRows));
  const auto b = static_cast<uint8_t>(most - a);
  ConfigureTiles({{a, a, b, b, a, b, kTileRows, kTileRows}});
  if (b > 0) {
    MultiplyPacks<Format, true>(x, packs, num_packs, panel);
  } else {
    MultiplyPacks<Format, false>(x, packs, num_packs, panel);
  }
}

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  WithPacks(x, tile_begin, tile_end, index, out, [&](const Rows* packs, int64_t num_packs) {
    switch (x.format) {
      case LinearFormat::kWint8:
        return MultiplyPacks<Int<Wint8>>(x, packs, num_packs, panel);
      case LinearFormat::kWint4:
        return MultiplyPacks<Int<Wint4>>(x, packs, num_packs, panel);
      default:
        return MultiplyPacks<Bf16>(x, packs, num_packs, panel);
    }
  });
}

}  // namespace

const RowKernels kRowKernels = {kPackRows, kBlockBytes, RowBytes, PackRows, MultiplyPanel, ReleaseTiles};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
