#pragma once
// How the weight formats are multiplied by a warp, from shared memory: 32 columns of a panel, the first operand of
// products, with rows of x, 8 to a product. So few rows cost few products.
//
// A panel has 16 *lines* in a stage, one for each word of a row of x, with that word of all columns (of e4m3 with rows
// of bfloat16 8, for two words each). A lane's words of
// a line lie side by side. Shared memory keeps the 16-byte chunks of lines and of rows of x in another order, such that
// no two lanes that read at once meet in a bank.
#include "linear_input.h"
#include "warpgroup.h"

namespace fdsd::cuda {

constexpr int kPanelProducts = kPanelColumns / kMatrixRows;  // side by side
constexpr int kChunkBytes = 16;
constexpr int kRowChunks = kStageRowBytes / kChunkBytes;  // of a row of x in a stage
constexpr int kStageSteps = kStageWords / kMatrixWords;   // products one after the other

// Sums of a warp's products over kRowTiles * 8 rows: elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of
// columns and rows each.
template <typename T, int kRowTiles, int kProducts = kPanelProducts>
struct Products {
  T values[kRowTiles][kProducts][4];

  __device__ __forceinline__ T& At(int i) { return values[i / 4 / kProducts][i / 4 % kProducts][i % 4]; }
};

struct Bf16Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kBFloat16;
  static constexpr bool kIsScaled = false;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kIsGrouped = false;
  static constexpr bool kIsWidened = false;
  static constexpr int kPieceStages = 1;
  static constexpr int kStageLines = kStageWords;
  static constexpr int kLineBytes = kPanelColumns * kStepBytes;
  static constexpr int64_t kUnitBytes = kLineBytes;
  static constexpr int kStageFactorBytes = 0;
  using Sum = float;
  using ByWarpgroup = Bf16Products;

  // Column of the panel that is row j (0..7) of half h of product n.
  static __device__ __forceinline__ int Column(int n, int h, int j) { return 4 * j + 2 * n + h; }
  // Where chunk c of a line is kept.
  static __device__ __forceinline__ int PlaceOf(int line, int c) { return c ^ (2 * line & 7); }
  // The lane's words of a line: those of half h of product n go to words[n][h].
  static __device__ __forceinline__ void Load(DevicePtr<const uint8_t> lines, int line, int j, uint32_t (*words)[2]) {
    const uint4 own = ViewAs<const uint4>(lines + line * kLineBytes)[PlaceOf(line, j)];
    words[0][0] = own.x;
    words[0][1] = own.y;
    words[1][0] = own.z;
    words[1][1] = own.w;
  }
};

struct Half16Weights : Bf16Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kFloat16;
  using ByWarpgroup = Half16Products;
};

struct Wint8Weights : Bf16Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kWint8;
  static constexpr bool kIsScaled = true;
  static constexpr bool kHasRowScales = true;
  static constexpr int kPieceStages = kGroupStages;
  static constexpr int kValueBytes = kWint8Bytes;
  static constexpr int64_t kUnitBytes = kWint8Bytes + kScaleBytes;
  static constexpr int kZeroPoint = kWint8ZeroPoint;
  using Sum = int32_t;
  using ByWarpgroup = IntegerProducts;
};

struct Fp8Weights : Wint8Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kFp8;
  static constexpr int kZeroPoint = 0;
  using Sum = float;
  using ByWarpgroup = Fp8Products;
};

// Codes become bfloat16 in registers, and are multiplied as such.
struct E4m3Weights : Fp8Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kE4m3;
  static constexpr bool kHasRowScales = false;
  static constexpr bool kIsWidened = true;
  static constexpr int kPieceStages = kWideGroupStages;
  static constexpr int kStageLines = kStageWords / 2;
  using ByWarpgroup = Bf16Products;
};

// The low and high four bits of a byte are columns 16 apart. Factors of a stage are kept after its lines.
struct Wint4Weights {
  static constexpr LinearFormat kFormat = LinearFormat::kWint4;
  static constexpr bool kIsScaled = true;
  static constexpr bool kHasRowScales = true;
  static constexpr bool kIsGrouped = false;
  static constexpr bool kIsWidened = false;
  static constexpr int kPieceStages = kGroupStages;
  static constexpr int kStageLines = kStageWords;
  static constexpr int kValueBytes = kWint4Bytes;
  static constexpr int kLineBytes = kPanelColumns / 2 * kStepBytes;
  static constexpr int64_t kUnitBytes = kWint4Bytes + kFactorBytes + kScaleBytes;
  static constexpr int kStageFactorBytes = kFactorBytes / kGroupStages;
  static constexpr int kZeroPoint = kWint8ZeroPoint;
  using Sum = int32_t;
  using ByWarpgroup = IntegerProducts;

  static __device__ __forceinline__ int Column(int n, int h, int j) { return 2 * j + h + n * (kPanelColumns / 2); }
  static __device__ __forceinline__ int PlaceOf(int line, int c) { return c ^ (line & 2); }
  static __device__ __forceinline__ void Load(DevicePtr<const uint8_t> lines, int line, int j, uint32_t (*words)[2]) {
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    const uint2 own = ViewAs<const uint2>(lines + line * kLineBytes)[2 * PlaceOf(line, j / 2) + j % 2];
    words[0][0] = own.x & kLow;
    words[0][1] = own.y & kLow;
    words[1][0] = own.x >> 4 & kLow;
    words[1][1] = own.y >> 4 & kLow;
  }
  // words = the int8 that they make with the factors of their inputs, + 128. Bytes stay apart: each is from 1 to 255.
  static __device__ __forceinline__ void Apply(DevicePtr<const uint8_t> factors, int j, uint32_t (*words)[2]) {
    constexpr uint32_t kOnes = 0x01010101u;
#pragma unroll
    for (int n = 0; n < kPanelProducts; ++n) {
      const uint32_t pair = ViewAs<const uint16_t>(factors + n * (kPanelColumns / 2))[j];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t factor = pair >> (8 * h) & 15;
        const uint32_t zero = pair >> (8 * h + 4) & 15;
        words[n][h] = words[n][h] * factor + (kZeroPoint - factor * zero) * kOnes;
      }
    }
  }
};

// Where chunk c of a row of x is kept among the row's.
__device__ __forceinline__ int RowPlaceOf(int row, int c) { return c ^ (row / 2 % kRowChunks); }

// The lane's codes of a step of a panel's lines whose codes are widened: a line has those of two words.
template <typename Weights>
__device__ __forceinline__ void LoadColumnCodes(DevicePtr<const uint8_t> lines, int step, uint32_t (*codes)[2]) {
  const int lane = threadIdx.x % kWarpSize;
  Weights::Load(lines, step * (kMatrixWords / 2) + lane % 4, lane / 4, codes);
}

// What they are widened to: words t and t + 4 have the numbers of codes 0 and 2, 1 and 3 (see FirstInputOf).
__device__ __forceinline__ void WidenColumnCodes(const uint32_t* codes, uint32_t* a) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Bf16Codes(codes[i % 2], i / 2);
}

// The lane's words of a step of a panel's lines: the first operand of its products.
template <typename Weights>
__device__ __forceinline__ void LoadColumnWords(DevicePtr<const uint8_t> lines, int step, uint32_t (*a)[4]) {
  if constexpr (Weights::kIsWidened) {
    uint32_t codes[kPanelProducts][2];
    LoadColumnCodes<Weights>(lines, step, codes);
#pragma unroll
    for (int n = 0; n < kPanelProducts; ++n) WidenColumnCodes(codes[n], a[n]);
    return;
  }
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[kPanelProducts][2];
    Weights::Load(lines, step * kMatrixWords + half * (kMatrixWords / 2) + lane % 4, lane / 4, words);
    if constexpr (Weights::kStageFactorBytes != 0) {
      static_assert(kMatrixWords / 2 * 4 == kFactorInputs);
      const int factors = kStageWords * Weights::kLineBytes + (2 * step + half) * kPanelColumns;
      Weights::Apply(lines + factors, lane / 4, words);
    }
#pragma unroll
    for (int n = 0; n < kPanelProducts; ++n) {
      a[n][2 * half] = words[n][0];
      a[n][2 * half + 1] = words[n][1];
    }
  }
}

// products += a panel's lines . rows of x, both of a stage, in one order for all rows.
template <typename Weights, int kRowTiles>
__device__ __forceinline__ void AddStage(DevicePtr<const uint8_t> lines, DevicePtr<const uint8_t> rows,
                                         Products<typename Weights::Sum, kRowTiles>* products) {
  // What one load has: both steps of one tile of rows, or one step of two.
  constexpr int kSteps = kRowTiles == 1 ? kStageSteps : 1;
  constexpr int kTiles = kStageSteps / kSteps;
  const int lane = threadIdx.x % kWarpSize;
  const int row = lane % kMatrixColumns;
  const int matrix = lane / kMatrixColumns;
#pragma unroll
  for (int first_step = 0; first_step < kStageSteps; first_step += kSteps) {
    uint32_t a[kSteps][kPanelProducts][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) LoadColumnWords<Weights>(lines, first_step + step, a[step]);
#pragma unroll
    for (int first_tile = 0; first_tile < kRowTiles; first_tile += kTiles) {
      const int own_row = (first_tile + matrix / (2 * kSteps)) * kMatrixColumns + row;
      const int chunk = 2 * first_step + matrix % (2 * kSteps);
      uint32_t b[kTiles][kSteps][2];
      LoadRowWords(rows + (own_row * kStageRowBytes + RowPlaceOf(row, chunk) * kChunkBytes), b[0][0]);
#pragma unroll
      for (int i = 0; i < kTiles * kSteps * kPanelProducts; ++i) {
        const int tile = i / kPanelProducts / kSteps;
        const int step = i / kPanelProducts % kSteps;
        const int n = i % kPanelProducts;
        auto& sums = products->values[first_tile + tile][n];
        if constexpr (Weights::kFormat == LinearFormat::kFp8) {
          AddFp8Product(sums, a[step][n], b[tile][step]);
        } else if constexpr (Weights::kFormat == LinearFormat::kFloat16) {
          AddHalf16Product(sums, a[step][n], b[tile][step]);
        } else {
          AddMatrixProduct(sums, a[step][n], b[tile][step]);
        }
      }
    }
  }
}

// The same by a warpgroup, of whose warps each has 16 columns of its lines, those of product `product`, with the rows
// of all. Ends when the products have.
template <typename Weights, int kRowTiles>
__device__ __forceinline__ void AddStageByWarpgroup(DevicePtr<const uint8_t> lines, DevicePtr<const uint8_t> rows,
                                                    int product,
                                                    Products<typename Weights::Sum, kRowTiles, 1>* products) {
  constexpr int kCount = kRowTiles * 4;
  uint32_t own[kStageSteps][4];
#pragma unroll
  for (int step = 0; step < kStageSteps; ++step) {
    if constexpr (Weights::kIsWidened) {
      uint32_t codes[kPanelProducts][2];
      LoadColumnCodes<Weights>(lines, step, codes);
      const uint32_t chosen[2] = {product == 0 ? codes[0][0] : codes[1][0], product == 0 ? codes[0][1] : codes[1][1]};
      WidenColumnCodes(chosen, own[step]);
    } else {
      uint32_t a[kPanelProducts][4];
      LoadColumnWords<Weights>(lines, step, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) own[step][i] = product == 0 ? a[0][i] : a[1][i];
    }
  }
  auto* const sums = products->values[0][0];
  BeginWarpgroupProducts<kCount>(sums);
#pragma unroll
  for (int step = 0; step < kStageSteps; ++step)
    AddWarpgroupProduct<typename Weights::ByWarpgroup, kRowTiles * kMatrixColumns>(sums, own[step], rows, step);
  WaitForWarpgroupProducts<kCount>(sums);
}

// sums += the products of a group, scaled. weight_scales f32[32], row_scales [rows] where rows have any; of the panel's
// products those from `first` on.
template <typename Weights, int kRowTiles, int kProducts>
__device__ __forceinline__ void AddScaled(DevicePtr<const float> weight_scales, DevicePtr<const GroupScale> row_scales,
                                          const Products<typename Weights::Sum, kRowTiles, kProducts>& products,
                                          int first, Products<float, kRowTiles, kProducts>* sums) {
  const int lane = threadIdx.x % kWarpSize;
  float own_scales[kProducts][2];
#pragma unroll
  for (int i = 0; i < kProducts * 2; ++i)
    own_scales[i / 2][i % 2] = weight_scales[Weights::Column(first + i / 2, i % 2, lane / 4)];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    if constexpr (!Weights::kHasRowScales) {
#pragma unroll
      for (int i = 0; i < kProducts * 4; ++i) {
        float& sum = sums->values[tile][i / 4][i % 4];
        sum = fmaf(products.values[tile][i / 4][i % 4], own_scales[i / 4][i / 2 % 2], sum);
      }
      continue;
    }
    const uint4 two = ViewAs<const uint4>(row_scales + (tile * kMatrixColumns + 2 * (lane % 4)))[0];
    const float scales[2] = {__uint_as_float(two.x), __uint_as_float(two.z)};
    using Sum = typename Weights::Sum;
    const Sum zeros[2] = {Weights::kZeroPoint * static_cast<Sum>(static_cast<int32_t>(two.y)),
                          Weights::kZeroPoint * static_cast<Sum>(static_cast<int32_t>(two.w))};
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto product = static_cast<float>(products.values[tile][n][i] - zeros[i % 2]);
        float& sum = sums->values[tile][n][i];
        sum = fmaf(product, scales[i % 2] * own_scales[n][i / 2], sum);
      }
    }
  }
}

}  // namespace fdsd::cuda
