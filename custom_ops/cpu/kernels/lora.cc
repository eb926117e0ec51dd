// Products of rows with the adapters in their slots. A slot's rows are taken together, so its matrices are read once
// for all of them where they are few.
#include "fdsd/lora.h"

#include <xmmintrin.h>

#include "linear_layout.h"
#include "lora_check.h"
#include "lora_rows.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows and columns of a register tile, and columns of a task, which are of one part.
#if defined(FDSD_SIMD_AVX512)
constexpr int kTileRows = 4;
constexpr int kDotColumns = 4;
constexpr int kVectors = 4;
#else
constexpr int kTileRows = 2;
constexpr int kDotColumns = 2;
constexpr int kVectors = 2;
#endif
constexpr int32_t kShrinkColumns = 8;
constexpr int32_t kExpandColumns = 512;
constexpr int32_t kAskedColumns = 256;  // so far ahead of those that are multiplied
static_assert(kShrinkColumns % kDotColumns == 0 && kExpandColumns % (kVectors * kLanes) == 0);

// What a step of a dot product adds to 16 sums: kSize neighbouring elements of both rows.
template <typename T>
struct DotStep {
  static constexpr int kSize = kLanes;
  using Elements = F32x16;
  static FDSD_INLINE Elements LoadSome(const T* p, int n) { return n == kSize ? Load(p) : LoadPartial(p, n); }
  static FDSD_INLINE F32x16 Add(F32x16 sum, Elements a, Elements b) { return Fma(a, b, sum); }
};

#if defined(FDSD_SIMD_AVX512)
template <>
struct DotStep<bf16> {
  static constexpr int kSize = 2 * kLanes;
  using Elements = __m512i;
  static FDSD_INLINE Elements LoadSome(const bf16* p, int n) {
    if (n == kSize) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static FDSD_INLINE F32x16 Add(F32x16 sum, Elements a, Elements b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b)};
  }
};
#endif

// Dot products of kRows rows of x with kColumns neighbouring rows of A. Each is one chain per lane.
template <typename T, int kRows, int kColumns>
FDSD_INLINE void DotTile(const T* const* x, const T* a, int64_t stride, const Slices& slices, float* const* u) {
  using Step = DotStep<T>;
  float parts[kMaxSlices][kRows][kColumns];
  for (int32_t s = 0; s < slices.count; ++s) {
    F32x16 sums[kRows][kColumns];
    for (auto& row : sums)
      for (auto& sum : row) sum = Set1(0.0f);
    const auto step = [&](int32_t k, int n) {
      typename Step::Elements of_x[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) of_x[r] = Step::LoadSome(x[r] + k, n);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const typename Step::Elements of_a = Step::LoadSome(a + c * stride + k, n);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[r][c] = Step::Add(sums[r][c], of_x[r], of_a);
      }
    };
    int32_t k = slices.inputs[s];
    for (; k + Step::kSize <= slices.inputs[s + 1]; k += Step::kSize) step(k, Step::kSize);
    if (k < slices.inputs[s + 1]) step(k, slices.inputs[s + 1] - k);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) parts[s][r][c] = ReduceAdd(sums[r][c]);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      float sum = parts[0][r][c];
      if (slices.count > 1) sum += parts[1][r][c];
      if (slices.count > 2) sum += parts[2][r][c] + parts[3][r][c];
      u[r][c] = sum;
    }
  }
}

// body(std::integral_constant) with the number of rows of each tile of `num_rows`, and the tile's first row.
template <typename Body>
FDSD_INLINE void ForTiles(int32_t num_rows, Body&& body) {
  int32_t r = 0;
  for (; r + kTileRows <= num_rows; r += kTileRows) body(std::integral_constant<int, kTileRows>(), r);
  if (kTileRows > 2 && r + 2 <= num_rows) {
    body(std::integral_constant<int, 2>(), r);
    r += 2;
  }
  if (r < num_rows) body(std::integral_constant<int, 1>(), r);
}

template <typename T>
void ShrinkTask(const LoraShrinkParams& p, const Slices& slices, const SlotRows::Task& task) {
  const auto blocks = static_cast<int32_t>(DivideUp(p.max_rank, kShrinkColumns));
  const int32_t part = task.block / blocks;
  const int32_t first = task.block % blocks * kShrinkColumns;
  const int32_t end = std::min(p.ranks[int64_t{task.slot} * p.num_parts + part], first + kShrinkColumns);
  const int64_t column = int64_t{part} * p.max_rank;
  const int64_t width = int64_t{p.num_parts} * p.max_rank;
  const T* const a = static_cast<const T*>(p.a) + (task.slot * width + column) * p.in_features;
  const auto tiles = [&](auto columns, int32_t c) {
    ForTiles(task.num_rows, [&](auto rows, int32_t r) {
      const T* x[rows];
      float* u[rows];
      for (int i = 0; i < rows; ++i) {
        x[i] = static_cast<const T*>(p.x) + int64_t{task.rows[r + i]} * p.in_features;
        u[i] = p.u + task.rows[r + i] * width + column + c;
      }
      DotTile<T, rows, columns>(x, a + int64_t{c} * p.in_features, p.in_features, slices, u);
    });
  };
  int32_t c = first;
  for (; c + kDotColumns <= end; c += kDotColumns) tiles(std::integral_constant<int, kDotColumns>(), c);
  for (; c < end; ++c) tiles(std::integral_constant<int, 1>(), c);
}

// y of kRows rows and kCount vectors of columns. Only a single vector may have fewer columns than lanes, `count`.
template <typename T, int kRows, int kCount>
FDSD_INLINE void AddTile(int32_t rank, float scale, const float* const* u, const T* b, int64_t stride, int count,
                         T* const* y) {
  const auto load = [&](const T* from, int v) {
    return kCount > 1 ? Load(from + v * kLanes) : LoadPartial(from, count);
  };
  F32x16 sums[kRows][kCount];
  for (auto& row : sums)
    for (auto& sum : row) sum = Set1(0.0f);
  for (int32_t i = 0; i < rank; ++i) {
    F32x16 of_b[kCount];
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) of_b[v] = load(b + i * stride, v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F32x16 factor = Set1(u[r][i]);
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) sums[r][v] = Fma(factor, of_b[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kCount; ++v) {
      const F32x16 sum = Fma(Set1(scale), sums[r][v], load(y[r], v));
      T* const to = y[r] + v * kLanes;
      kCount > 1 ? Store(sum, to) : StorePartial(sum, to, count);
    }
  }
}

// Ask for the same columns of every row of B. Rows lie apart, and the processor's prefetcher does not follow so many.
template <typename T>
FDSD_INLINE void AskForColumns(const T* b, int64_t stride, int32_t rank) {
  for (int32_t i = 0; i < rank; ++i)
    for (int line = 0; line < kVectors * kLanes * static_cast<int>(sizeof(T)); line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(b + i * stride) + line, _MM_HINT_T1);
}

// Blocks of columns within the parts.
int32_t NumExpandBlocks(const LoraExpandParams& p) {
  int64_t count = 0;
  for (int32_t part = 0; part < p.num_parts; ++part)
    count += DivideUp(p.part_ends[part] - (part == 0 ? 0 : p.part_ends[part - 1]), kExpandColumns);
  return static_cast<int32_t>(count);
}

template <typename T>
void ExpandTask(const LoraExpandParams& p, const SlotRows::Task& task) {
  int32_t part = 0;
  int32_t begin = 0;
  int32_t block = task.block;
  for (;; ++part) {
    const auto blocks = static_cast<int32_t>(DivideUp(p.part_ends[part] - begin, kExpandColumns));
    if (block < blocks) break;
    block -= blocks;
    begin = p.part_ends[part];
  }
  const int64_t of_part = int64_t{task.slot} * p.num_parts + part;
  const int32_t rank = p.ranks[of_part];
  if (rank == 0) return;
  const int32_t first = begin + block * kExpandColumns;
  const int32_t end = std::min(p.part_ends[part], first + kExpandColumns);
  const T* const b = static_cast<const T*>(p.b) + int64_t{task.slot} * p.max_rank * p.out_features;
  const auto tiles = [&](auto vectors, int32_t n, int count) {
    ForTiles(task.num_rows, [&](auto rows, int32_t r) {
      const float* u[rows];
      T* y[rows];
      for (int i = 0; i < rows; ++i) {
        u[i] = p.u + (int64_t{task.rows[r + i]} * p.num_parts + part) * p.max_rank;
        y[i] = static_cast<T*>(p.y) + int64_t{task.rows[r + i]} * p.out_features + n;
      }
      AddTile<T, rows, vectors>(rank, p.scales[of_part], u, b + n, p.out_features, count, y);
    });
  };
  constexpr int kColumns = kVectors * kLanes;
  int32_t n = first;
  for (; n + kColumns <= end; n += kColumns) {
    AskForColumns(b + n + kAskedColumns, p.out_features, rank);
    tiles(std::integral_constant<int, kVectors>(), n, kColumns);
  }
  for (; n < end; n += kLanes) tiles(std::integral_constant<int, 1>(), n, std::min(kLanes, end - n));
}

Error CheckPartEnds(const LoraExpandParams& p) {
  int32_t last = 0;
  for (int32_t part = 0; part < p.num_parts; ++part) {
    if (p.part_ends[part] < last) return "part_ends: expected rising columns, got others";
    last = p.part_ends[part];
  }
  return last == p.out_features ? nullptr : "part_ends: expected the last to be y's columns, got another";
}

}  // namespace

Error LoraShrink(const LoraShrinkParams& p) {
  if (const Error error = CheckLoraShrink(p)) return error;
  bool has_adapters = false;
  if (const Error error = CheckSlots(p.slots, p.num_rows, p.num_slots, &has_adapters)) return error;
  if (const Error error = CheckRanks(p.ranks, int64_t{p.num_slots} * p.num_parts, p.max_rank)) return error;
  const auto row_bytes = sizeof(float) * static_cast<size_t>(p.num_parts) * static_cast<size_t>(p.max_rank);
  std::memset(p.u, 0, row_bytes * static_cast<size_t>(p.num_rows));
  if (!has_adapters) return nullptr;
  const Slices slices = SlicesOf(p.in_features, LinearFormat::kFloat32, p.slices);
  const auto num_blocks = static_cast<int32_t>(p.num_parts * DivideUp(p.max_rank, kShrinkColumns));
  ForSlots(p.slots, p.num_rows, p.num_slots, num_blocks, [&](const SlotRows::Task& task) {
    p.dtype == DType::kFloat32 ? ShrinkTask<float>(p, slices, task) : ShrinkTask<bf16>(p, slices, task);
  });
  return nullptr;
}

Error LoraExpand(const LoraExpandParams& p) {
  if (const Error error = CheckLoraExpand(p)) return error;
  bool has_adapters = false;
  if (const Error error = CheckSlots(p.slots, p.num_rows, p.num_slots, &has_adapters)) return error;
  if (const Error error = CheckRanks(p.ranks, int64_t{p.num_slots} * p.num_parts, p.max_rank)) return error;
  if (const Error error = CheckPartEnds(p)) return error;
  if (!has_adapters) return nullptr;
  ForSlots(p.slots, p.num_rows, p.num_slots, NumExpandBlocks(p), [&](const SlotRows::Task& task) {
    p.dtype == DType::kFloat32 ? ExpandTask<float>(p, task) : ExpandTask<bf16>(p, task);
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
