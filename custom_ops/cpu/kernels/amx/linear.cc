// Packed rows times a panel, on tiles. A sum goes through its slice in the order of K whatever the number of rows; the
// bits of bf16 are this level's own, those of the int formats every level's.
#include "amx/linear_bf16.h"
#include "amx/linear_int.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {
namespace {

// Ends slice `index`: adds the sums that wait in the levels below to the slice's own.
void EndSlice(int32_t index, int num_rows, float* levels) {
  const int level = SumLevel(index);
  float* sums = levels + level * kBlockSums;
  for (int i = 0; i < num_rows * kPanelColumns && level > 0; i += kLanes) {
    F32x16 sum = Load(sums + i);
    for (int l = 0; l < level; ++l) sum = Add(Load(levels + l * kBlockSums + i), sum);
    Store(sum, sums + i);
  }
}

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
      EndSlice(s, packs[i].count, packs[i].levels);
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
  const int64_t num_packs = tile_end - tile_begin;
  const int last_level = SumLevel(x.slices.count - 1);
  const int64_t pack_sums = (last_level + 1) * kBlockSums;
  float* const levels = ScratchArray<float>(Scratch::kInnerTask, num_packs * pack_sums);
  Rows* const packs = ScratchArray<Rows>(Scratch::kTask, num_packs);
  for (int64_t i = 0; i < num_packs; ++i) {
    packs[i] = {x.Tile(tile_begin + i), x.Size(tile_begin + i), levels + i * pack_sums};
  }
  switch (x.format) {
    case LinearFormat::kWint8:
      MultiplyPacks<Int<Wint8>>(x, packs, num_packs, panel);
      break;
    case LinearFormat::kWint4:
      MultiplyPacks<Int<Wint4>>(x, packs, num_packs, panel);
      break;
    default:
      MultiplyPacks<Bf16>(x, packs, num_packs, panel);
  }
  for (int64_t i = 0; i < num_packs; ++i) {
    StoreSums(packs[i].levels + last_level * kBlockSums, packs[i].count, x.Begin(tile_begin + i), index, out);
  }
}

// The second-level cache of a processor with AMX has 2 MiB.
constexpr int64_t kBlockBytes = 1024 * 1024;

void Leave() { ReleaseTiles(); }

}  // namespace

const RowKernels kRowKernels = {kPackRows, kBlockBytes, RowBytes, PackRows, MultiplyPanel, Leave};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
