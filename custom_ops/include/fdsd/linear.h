#pragma once
#include "fdsd/status.h"

namespace fdsd {

// How a weight matrix is stored and multiplied. The int formats also quantise x: int8 per row and group of 128.
enum class LinearFormat : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kWint8 = 2,  // W8A8: int8 weights, one float scale per output and group of 128 inputs
  kWint4 = 3,  // W4A8: int4 weights, likewise
};
constexpr int32_t kQuantGroup = 128;

// Bytes of the packed form of a [out_features, in_features] matrix, a multiple of 64.
int64_t PackedLinearBytes(int32_t in_features, int32_t out_features, LinearFormat format);

// Quantise and reorder a row-major matrix into the layout `Linear` streams; the same on every instruction-set level.
struct PackLinearParams {
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;
  DType weight_dtype;
  const void* weight;  // [N, K]
  void* packed;        // PackedLinearBytes(K, N, format) bytes, 64-byte aligned
};
Error PackLinear(const PackLinearParams& p);

// y = x . weight^T (+ bias). Each output element is summed in one order that does not depend on M or on the threads.
struct LinearParams {
  int32_t num_rows;      // M
  int32_t in_features;   // K
  int32_t out_features;  // N
  LinearFormat format;
  DType x_dtype;
  DType y_dtype;
  const void* x;       // [M, K]
  const void* packed;  // from PackLinear
  const float* bias;   // [N], may be nullptr
  void* y;             // [M, N]
};
Error Linear(const LinearParams& p);

}  // namespace fdsd
