// The formats with groups on tiles, with the bits of every level: see linear_grouped.cc. A tile step has the inputs of
// one group, at most 64: rows of A of 16 or 32 bytes, and as many rows of B as these are words. Each group's exact dot
// products are stored, and vectors add them up as floats.
#include "amx/linear_block.h"
#include "linear_unit.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {
namespace {

// Groups that are multiplied and added up at a time: what is stored of them fits the first-level cache twice.
constexpr int kGroupsAtOnce = 2;
constexpr int64_t kRowStride = kQuantGroup;

using Dots32 = int32_t[kGroupsAtOnce][kBlockSums];

// The codes of a unit as int8 [32][32][4], and its scales and minima.
template <GroupFormat kGroups>
void ReadSigned(const uint8_t* from, Asked* asked, Unit* to) {
  const __m512i zero = _mm512_set1_epi8(static_cast<char>(kGroups.zero));
  EachCodes<kGroups.bits>(from, asked, to->unpacked,
                          [&](const Codes& codes, uint8_t* out) __attribute__((always_inline)) {
                            _mm512_storeu_si512(out, _mm512_sub_epi8(codes, zero));
                          });
  ReadScales<kGroups>(from + kGroups.code_bytes(), to);
}

// What tiles multiply of a pack and a unit, and what vectors then add up.
struct Products {
  const Unit* unit;
  const uint8_t* integers;  // [rows][128]
  const float* x_scales;    // [rows]
  const float* x_sums;      // [groups][rows], for minima
  int num_rows;
  int first_group;
  float* sums;  // [32][32]
};

template <int kGroup, bool kBoth>
FDSD_INLINE void MultiplyGroup(const uint8_t* a, const uint8_t* b) {
  constexpr int kInputs = std::min(kGroup, kStepRowBytes);
  ZeroSums<kBoth>();
  for (int k = 0; k < kGroup; k += kInputs, a += kInputs, b += kInputs / kStepBytes * kPanelStepBytes) {
    LoadTile<4>(a, kRowStride);
    LoadTile<6>(b, kPanelStepBytes);
    LoadTile<7>(b + kHalfColumnsBytes, kPanelStepBytes);
    DotS8S8<0, 4, 6>();
    DotS8S8<1, 4, 7>();
    if constexpr (kBoth) {
      LoadTile<5>(a + kTileRows * kRowStride, kRowStride);
      DotS8S8<2, 5, 6>();
      DotS8S8<3, 5, 7>();
    }
  }
}

template <int kGroup, bool kHasMinima>
FDSD_INLINE void AddGroups(const Products& p, const Dots32& dots, float* own) {
  constexpr int kNum = kQuantGroup / kGroup;
  constexpr int kCount = std::min(kNum, kGroupsAtOnce);
  for (int v = 0; v < kPanelVectors; ++v) {
    F32x16 scales[kCount], minima[kCount];
    for (int g = 0; g < kCount; ++g) {
      scales[g] = Load(p.unit->scales[p.first_group + g] + v * kLanes);
      minima[g] = Load(p.unit->minima[p.first_group + g] + v * kLanes);
    }
    for (int r = 0; r < p.num_rows; ++r) {
      const int at = r * kPanelColumns + v * kLanes;
      F32x16 total = p.first_group == 0 ? Set1(0.0f) : Load(own + at);
      for (int g = 0; g < kCount; ++g) {
        total = Fma(ToFloats(_mm512_load_si512(dots[g] + at)), scales[g], total);
        if constexpr (kHasMinima) {
          total = Fma(Set1(p.x_sums[(p.first_group + g) * p.num_rows + r]), minima[g], total);
        }
      }
      if (p.first_group + kCount < kNum) {
        Store(total, own + at);
      } else {
        Store(Fma(total, Set1(p.x_scales[r]), Load(p.sums + at)), p.sums + at);
      }
    }
  }
}

using ReadFunction = void (*)(const uint8_t* from, Asked* asked, Unit* to);

// While the tiles multiply some groups, the vectors add up those before, and unpack the next unit: tiles cannot be
// loaded from what has just been stored without a wait.
template <int kGroup, bool kHasMinima, bool kBoth>
void MultiplyPacks(const PackedRows& x, const Rows* packs, int64_t num_packs, const uint8_t* panel, ReadFunction read) {
  constexpr int kNum = kQuantGroup / kGroup;
  constexpr int kCount = std::min(kNum, kGroupsAtOnce);
  const int64_t unit_bytes = PanelUnitBytes(x.format);
  const int64_t ahead = PrefetchAhead(x.format, std::min(x.num_rows, kMaxPrefetchRows));
  const int lines = ahead == 0 ? 0 : static_cast<int>(DivideUp(unit_bytes, 64 * kReadAsks));
  const auto read_unit = [&](int64_t u, Unit* to) {
    const uint8_t* const from = panel + u * unit_bytes;
    Asked asked{from + ahead, from + ahead + unit_bytes, lines};
    read(from, &asked, to);
  };
  alignas(64) Dots32 dots[2];
  alignas(64) float own[kBlockSums];
  Unit units[2];
  for (int32_t s = 0; s < x.slices.count; ++s) {
    const int64_t begin = x.slices.units[s];
    const int64_t end = x.slices.units[s + 1];
    for (int64_t i = 0; i < num_packs; ++i) {
      std::memset(packs[i].levels + SumLevel(s) * kBlockSums, 0, sizeof(float) * kBlockSums);
    }
    if (begin < end) read_unit(begin, &units[begin & 1]);
    Products before{};
    int64_t count = 0;
    for (int64_t u = begin; u < end; ++u) {
      for (int64_t i = 0; i < num_packs; ++i) {
        const GroupPack pack(const_cast<uint8_t*>(packs[i].pack), x.slices, packs[i].count);
        const int64_t row = u * packs[i].count;
        Products now{&units[u & 1],
                     pack.integers + row * kQuantGroup,
                     pack.scales + row,
                     pack.sums + row * kNum,
                     packs[i].count,
                     0,
                     packs[i].levels + SumLevel(s) * kBlockSums};
        for (; now.first_group < kNum; now.first_group += kCount, ++count) {
          Dots32& found = dots[count & 1];
          for (int g = 0; g < kCount; ++g) {
            const int first = (now.first_group + g) * kGroup;
            MultiplyGroup<kGroup, kBoth>(now.integers + first, now.unit->unpacked + first * kPanelColumns);
            StoreTiles<kBoth>(found[g]);
          }
          if (count > 0) AddGroups<kGroup, kHasMinima>(before, dots[(count - 1) & 1], own);
          // The unit before this one is no longer needed.
          if (i == 0 && now.first_group == 0 && u + 1 < end) read_unit(u + 1, &units[(u + 1) & 1]);
          before = now;
        }
      }
    }
    if (count > 0) AddGroups<kGroup, kHasMinima>(before, dots[(count - 1) & 1], own);
    for (int64_t i = 0; i < num_packs; ++i) EndSlice(s, packs[i]);
  }
}

template <GroupFormat kGroups>
void MultiplyFormat(const PackedRows& x, const Rows* packs, int64_t num_packs, const uint8_t* panel) {
  constexpr bool kHasMinima = kGroups.minimum != GroupMinimum::kNone;
  static_assert(kHasMinima || kGroups.group < kQuantGroup);  // linear_int.h has one scale for all inputs of a unit
  constexpr auto kInputs = static_cast<uint8_t>(std::min(kGroups.group, kStepRowBytes));
  constexpr uint8_t kWords = kInputs / kStepBytes;
  // All packs have the shape of the largest.
  const int most = static_cast<int>(DivideUp(x.num_rows, x.num_tiles));
  const auto a = static_cast<uint8_t>(std::min(most, kTileRows));
  const auto b = static_cast<uint8_t>(most - a);
  ConfigureTiles({{a, a, b, b, a, b, kWords, kWords}, {64, 64, 64, 64, kInputs, kInputs, 64, 64}});
  if (b > 0) {
    MultiplyPacks<kGroups.group, kHasMinima, true>(x, packs, num_packs, panel, ReadSigned<kGroups>);
  } else {
    MultiplyPacks<kGroups.group, kHasMinima, false>(x, packs, num_packs, panel, ReadSigned<kGroups>);
  }
}

// By the format, which is one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kQ4Of0)>
void MultiplyFrom(const PackedRows& x, const Rows* packs, int64_t num_packs, const uint8_t* panel) {
  constexpr auto kFormat = static_cast<LinearFormat>(kFirst);
  if constexpr (kFirst + 1 < kNumLinearFormats) {
    if (x.format != kFormat) return MultiplyFrom<kFirst + 1>(x, packs, num_packs, panel);
  }
  MultiplyFormat<GroupFormatOf(kFormat)>(x, packs, num_packs, panel);
}

void MultiplyPanel(const PackedRows& x, int64_t tile_begin, int64_t tile_end, const uint8_t* panel, int64_t index,
                   const LinearOutput& out) {
  WithPacks(x, tile_begin, tile_end, index, out,
            [&](const Rows* packs, int64_t num_packs) { MultiplyFrom(x, packs, num_packs, panel); });
}

}  // namespace

const RowKernels kGroupedRowKernels = {kPackRows, kBlockBytes, RowBytes, PackRows, MultiplyPanel, ReleaseTiles};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
