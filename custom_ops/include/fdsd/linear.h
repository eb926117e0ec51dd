#pragma once
#include "fdsd/status.h"

namespace fdsd {

// How a weight matrix is stored and multiplied. wint8, wint4 and fp8 also quantise x, per row and group of 128.
enum class LinearFormat : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kWint8 = 2,    // W8A8: int8 weights, one float scale per output and group of 128 inputs
  kWint4 = 3,    // W4A8: likewise, but the int8 are made of 4-bit codes: a factor * (code - zero), both of 16 inputs
  kFp8 = 4,      // W8A8: e4m3 with a scale likewise, x too. Only GPUs multiply it
  kFloat16 = 5,  // laid out as bfloat16. Only GPUs multiply it
  kE4m3 = 6,     // W8A16: packed as kFp8, x is bfloat16
  // Integers with a scale, and for some a minimum or a zero point, per output and group of 16 to 128 inputs, as
  // checkpoints store them. x is int8, per row and group of 128. See linear_grouped.h.
  kQ4Of0 = 7,
  kQ4Of1 = 8,
  kQ5Of0 = 9,
  kQ5Of1 = 10,
  kQ8Of0 = 11,
  kQ2K = 12,
  kQ3K = 13,
  kQ4K = 14,
  kQ5K = 15,
  kQ6K = 16,
  kIq4Xs = 17,
  kMxfp4 = 18,
  kInt8Of16 = 19,  // holds what any of these do
  kInt6Of16 = 20,  // holds what any of kQ2K to kQ6K do
  kInt4Of32 = 21,
  kInt4Of64 = 22,
  kInt4Of128 = 23,
  kInt8Of32 = 24,
};
constexpr int32_t kQuantGroup = 128;
constexpr int32_t kNumLinearFormats = 25;

// How a sum over K inputs is cut into slices. Their float32 sums are added in a binary tree, 4 of them as (s0 + s1) +
// (s2 + s3). The inputs are halved, and the halves again until there are `num_slices`, at multiples of `slice_unit` (of
// n units the left half gets n / 2, the last unit may be short). So the same rule cuts half of the inputs into half as
// many slices. Groups of 128 inputs begin anew with every slice.
struct SliceRule {
  int32_t num_slices;  // 1, 2 or 4
  int32_t slice_unit;  // in inputs, at least 1
};
constexpr int32_t kMaxSlices = 4;

// Bytes of the packed form of a [out_features, in_features] matrix, a multiple of 64.
int64_t PackedLinearBytes(int32_t in_features, int32_t out_features, LinearFormat format, SliceRule slices);

// Element types that a weight matrix may have before it is packed; the first two are DType's.
enum class WeightDType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Some rows of a weight matrix, wherever they lie: a range of rows and inputs of a larger matrix is read in place.
struct WeightRows {
  const void* data;  // [num_rows, K], or [K, num_rows] if transposed
  int64_t stride;    // elements from one row of `data` to the next
  int32_t num_rows;
  WeightDType dtype;
  int32_t is_transposed;
};

// Quantise and reorder a matrix into the layout `Linear` streams; the same on every instruction-set level. The matrix
// is given as parts that follow one another along N (q, k and v; gate and up), so the caller need not copy them
// together first.
struct PackLinearParams {
  int32_t in_features;   // K
  int32_t out_features;  // N = sum of parts[i].num_rows
  LinearFormat format;
  SliceRule slices;
  int32_t num_parts;
  const WeightRows* parts;  // [num_parts]
  void* packed;             // PackedLinearBytes(K, N, format, slices) bytes, 64-byte aligned
};
Error PackLinear(const PackLinearParams& p);

// Reorder a matrix of codes with a scale per group into that layout, as it is. On a processor by the calling thread
// alone.
struct PackIntegersParams {
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;   // wint8, wint4, fp8, e4m3 or one of integers with groups
  SliceRule slices;
  const int8_t* codes;     // [N, K], less the format's zero; e4m3 as it is
  const uint8_t* factors;  // [panels, units, bytes]: what a unit has after its codes, scales and minima
  void* packed;            // as PackLinear's
};
Error PackIntegers(const PackIntegersParams& p);

// y = x . weight^T (+ bias). Each output element is summed in one order that does not depend on M or on the threads.
// Each slice is summed over its inputs in float32, then the slices in their tree, then the bias is added. Then it is
// rounded.
struct LinearParams {
  int32_t num_rows;      // M
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;
  SliceRule slices;  // the weights are packed by the same
  DType x_dtype;
  DType y_dtype;
  const void* x;       // [M, K]
  const void* packed;  // from PackLinear
  const float* bias;   // [N], may be nullptr
  void* y;             // [M, N]
};
Error Linear(const LinearParams& p);

// Of every head h: y[:, h] = x[:, h] . weight[h]^T, over the first K elements of a head of x. The other P are left out,
// or pass: then a head of y has them after its products. A row's bits depend on that row alone.
struct HeadLinearParams {
  int32_t num_tokens;    // T
  int32_t num_heads;     // Hq
  int32_t num_rest;      // P
  int32_t passes;        // 1: they are copied to y
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;
  DType dtype;         // of x and y
  const void* x;       // [T, Hq, K + P]
  const void* packed;  // [Hq] matrices, one after another, each from PackLinear without slices
  void* y;             // [T, Hq, N], or where the others pass [T, Hq, N + P]
};
Error HeadLinear(const HeadLinearParams& p);

// y[i] = row indices[i] of a packed matrix of integers, as numbers.
struct GatherWeightRowsParams {
  int32_t num_rows_out;
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;   // wint8, wint4 or one of integers with groups
  DType y_dtype;
  const void* packed;      // without slices
  const int32_t* indices;  // [num_rows_out]
  void* y;                 // [num_rows_out, K]
};
Error GatherWeightRows(const GatherWeightRowsParams& p);

// y[:, i] = column columns[i] of x, or zeros where that is -1: the inputs of a matrix whose groups were no neighbours.
struct GatherColumnsParams {
  int32_t num_rows;     // M
  int32_t num_columns;  // of x
  int32_t num_gathered;
  DType dtype;
  const void* x;           // [M, num_columns]
  const int32_t* columns;  // [num_gathered]
  void* y;                 // [M, num_gathered]
};
Error GatherColumns(const GatherColumnsParams& p);

}  // namespace fdsd
