// Products of attention in tiles: two tiles of 16 query vectors meet two of 16 keys, or of 16 columns of values, so
// that four loads feed four products. Each sum has one order along its elements, however many vectors there are.
#include "amx/tiles.h"
#include "attention_amx.h"

namespace fdsd {
namespace FDSD_ISA {
namespace FDSD_TILES {
namespace {

// 0 and 1: sums of the first 16 vectors with the first and the second 16 columns; 2 and 3: of the second 16 vectors.
// 4 and 5: the vectors. 6 and 7: keys or values.
constexpr TileShape kShape = {{16, 16, 16, 16, 16, 16, 16, 16}};
static_assert(kTileRows == kAmxVectors && kTileRows == kAmxPacks && kTileColumns == kPanelKeys);

template <typename T>
struct Product;

template <>
struct Product<bf16> {
  template <int kC, int kA, int kB>
  static FDSD_INLINE void AddScores() {
    DotBf16<kC, kA, kB>();
  }
  template <int kC, int kA, int kB>
  static FDSD_INLINE void AddValues() {
    DotBf16<kC, kA, kB>();
  }
};

template <>
struct Product<int8_t> {
  template <int kC, int kA, int kB>
  static FDSD_INLINE void AddScores() {
    DotS8S8<kC, kA, kB>();
  }
  template <int kC, int kA, int kB>
  static FDSD_INLINE void AddValues() {
    DotU8S8<kC, kA, kB>();
  }
};

FDSD_INLINE void ZeroSums() {
  ZeroTile<0>();
  ZeroTile<1>();
  ZeroTile<2>();
  ZeroTile<3>();
}

// 16 rows of 64 bytes, `stride` bytes apart.
struct Rows {
  const void* from;
  int64_t stride;
};

FDSD_INLINE void FetchRows(const void* from, int64_t stride) {
  for (int r = 0; r < kTileRows; ++r) Prefetch(static_cast<const char*>(from) + r * stride);
}

// Packs of 16 keys from element d of the head on. The head's end is followed by another head: a copy has zeros there.
template <typename T>
FDSD_INLINE Rows KeyRows(const KvBlock<T>& block, int panel, int d, uint8_t* copy) {
  const int64_t stride = block.k_stride * int64_t{sizeof(T)};
  const T* const from = block.k[panel] + d / kPackSize<T> * block.k_stride;
  const int num_packs = std::min(kAmxPacks, (block.head_dim - d) / kPackSize<T>);
  if (num_packs == kAmxPacks) return {from, stride};
  std::memset(copy, 0, kTileBytes);
  for (int r = 0; r < num_packs; ++r) {
    std::memcpy(copy + r * kTileRowBytes, from + r * block.k_stride, kTileRowBytes);
  }
  return {copy, kTileRowBytes};
}

// Scores of 16 or, kHasSecond, 32 vectors from vector `first` on with panels `panel` and `panel` + 1.
template <typename T, bool kHasSecond>
void ScorePanels(const AmxScores<T>& s, int first, int panel) {
  alignas(64) uint8_t copies[2][kTileBytes];
  const int64_t q_stride = s.q_stride * int64_t{sizeof(T)};
  const auto* const q = s.q + int64_t{first} * s.q_stride;
  ZeroSums();
  for (int d = 0; d < s.block.head_dim; d += kAmxElements<T>) {
    const int64_t offset = d / kPackSize<T> * s.block.k_stride;
    LoadTile<4>(q + d, q_stride);
    const Rows keys = KeyRows(s.block, panel, d, copies[0]);
    LoadTile<6>(keys.from, keys.stride);
    Product<T>::template AddScores<0, 4, 6>();
    const Rows others = KeyRows(s.block, panel + 1, d, copies[1]);
    LoadTile<7>(others.from, others.stride);
    Product<T>::template AddScores<1, 4, 7>();
    if (first == 0) {
      FetchRows(s.block.next[panel] + offset, s.block.k_stride * int64_t{sizeof(T)});
      FetchRows(s.block.next[panel + 1] + offset, s.block.k_stride * int64_t{sizeof(T)});
    }
    if constexpr (kHasSecond) {
      LoadTile<5>(q + d + int64_t{kAmxVectors} * s.q_stride, q_stride);
      Product<T>::template AddScores<2, 5, 6>();
      Product<T>::template AddScores<3, 5, 7>();
    }
  }
  constexpr int64_t kStride = kPartitionKeys * int64_t{sizeof(float)};
  float* const scores = s.scores + first * kPartitionKeys + panel * kPanelKeys;
  StoreTile<0>(scores, kStride);
  StoreTile<1>(scores + kPanelKeys, kStride);
  if constexpr (kHasSecond) {
    StoreTile<2>(scores + kAmxVectors * kPartitionKeys, kStride);
    StoreTile<3>(scores + kAmxVectors * kPartitionKeys + kPanelKeys, kStride);
  }
}

template <typename T>
void Scores(const AmxScores<T>& s) {
  ConfigureTiles(kShape);
  for (int first = 0; first < s.num_vectors; first += 2 * kAmxVectors) {
    for (int panel = 0; panel < kBlockPanels; panel += 2) {
      if (s.num_vectors - first > kAmxVectors) {
        ScorePanels<T, true>(s, first, panel);
      } else {
        ScorePanels<T, false>(s, first, panel);
      }
    }
  }
}

// Sums as tiles 0 to 3 hold them: [second vectors][second columns].
struct alignas(64) Sums {
  float v[2][2][kTileRows * kTileColumns];
};

template <bool kHasSecond>
FDSD_INLINE void StoreSums(Sums* sums) {
  StoreTile<0>(sums->v[0][0], kTileRowBytes);
  StoreTile<1>(sums->v[0][1], kTileRowBytes);
  if constexpr (kHasSecond) {
    StoreTile<2>(sums->v[1][0], kTileRowBytes);
    StoreTile<3>(sums->v[1][1], kTileRowBytes);
  }
}

// What is taken from tiles: 16 or 32 vectors from `first` on, and one or two times 16 columns from `column` on.
struct Window {
  int first;
  int column;
  int num_columns;  // 1 or 2 times 16
};

// Add one step's products to the tiles.
template <typename T, bool kHasSecond>
FDSD_INLINE void AddStep(const AmxValues<T>& x, const Window& w, int step) {
  const int64_t stride = x.head_dim * int64_t{4};
  constexpr int64_t kWeightStride = kPartitionKeys * int64_t{sizeof(*x.weights)};
  const auto* const weights = x.weights + w.first * kPartitionKeys + step * kAmxElements<T>;
  const T* const v = x.v[step] + w.column * kPackSize<T>;
  LoadTile<4>(weights, kWeightStride);
  LoadTile<6>(v, stride);
  Product<T>::template AddValues<0, 4, 6>();
  if constexpr (kHasSecond) {
    LoadTile<5>(weights + kAmxVectors * kPartitionKeys, kWeightStride);
    Product<T>::template AddValues<2, 5, 6>();
  }
  if (w.num_columns > 1) {
    LoadTile<7>(v + kTileColumns * kPackSize<T>, stride);
    Product<T>::template AddValues<1, 4, 7>();
    if constexpr (kHasSecond) Product<T>::template AddValues<3, 5, 7>();
  }
  if (w.first != 0) return;
  // As many lines as the tiles have, in order.
  const char* const next = reinterpret_cast<const char*>(x.next[step]) + w.column * kTileRowBytes;
  for (int i = 0; i < w.num_columns; ++i) FetchRows(next + i * kTileBytes, kTileRowBytes);
}

// Call body(vector, y, sums) for each vector of the window from `begin` on and each of its 16 columns: y of the
// caller's sums, and those of the tiles.
template <typename T, typename Body>
FDSD_INLINE void ForEachSum(const AmxValues<T>& x, const Window& w, int begin, const Sums& sums, Body&& body) {
  const int end = std::min(x.num_vectors, w.first + 2 * kAmxVectors);
  for (int i = std::max(begin, w.first); i < end; ++i) {
    const int row = i - w.first;
    float* const y = x.sums + i * x.sums_stride + w.column;
    for (int c = 0; c < w.num_columns; ++c) {
      body(i, y + c * kTileColumns, sums.v[row / kTileRows][c] + row % kTileRows * kTileColumns);
    }
  }
}

template <bool kHasSecond>
void ValueColumns(const AmxValues<bf16>& x, const Window& w) {
  Sums sums;
  ZeroSums();
  for (int step = 0; step < x.num_steps; ++step) AddStep<bf16, kHasSecond>(x, w, step);
  StoreSums<kHasSecond>(&sums);
  // The sign of a zero may come from keys of weight 0, which are there for other rows: adding 0 takes it away.
  ForEachSum(x, w, 0, sums, [](int, float* y, const float* sum) { Store(Add(Load(sum), Set1(0.0f)), y); });
}

template <bool kHasSecond>
void ValueColumns(const AmxValues<int8_t>& x, const Window& w) {
  Sums sums;
  for (int step = 0; step < x.num_steps; ++step) {
    ZeroSums();
    AddStep<int8_t, kHasSecond>(x, w, step);
    StoreSums<kHasSecond>(&sums);
    const float* const factors = x.factors + step * kMaxRunVectors;
    ForEachSum(x, w, x.first_vectors[step], sums, [&](int i, float* y, const float* sum) {
      KvDot<int8_t>::FinishValue({(__v16si)_mm512_load_si512(sum)}, factors[i], y);
    });
  }
}

template <typename T>
void Values(const AmxValues<T>& x) {
  ConfigureTiles(kShape);
  const int num_columns = x.head_dim / kTileColumns;
  for (int first = 0; first < x.num_vectors; first += 2 * kAmxVectors) {
    for (int column = 0; column < num_columns; column += 2) {
      const Window window{first, column * kTileColumns, std::min(2, num_columns - column)};
      if (x.num_vectors - first > kAmxVectors) {
        ValueColumns<true>(x, window);
      } else {
        ValueColumns<false>(x, window);
      }
    }
  }
}

}  // namespace

const AmxAttention kAmxAttention = {
    {Scores<bf16>, Values<bf16>}, {Scores<int8_t>, Values<int8_t>}, [] { ReleaseTiles(); }};

}  // namespace FDSD_TILES
}  // namespace FDSD_ISA
}  // namespace fdsd
