#pragma once
#include "fdsd/status.h"

namespace fdsd {

// h = x * x_scale (+ residual), kept in float32; y = h / sqrt(mean(h^2) + eps) * weight.
struct RmsNormParams {
  int32_t num_rows;     // T
  int32_t hidden_size;  // H
  DType dtype;          // of x and y
  float eps;
  float x_scale;
  const void* x;          // [T, H]
  const float* residual;  // [T, H], may be nullptr
  const float* weight;    // [H]
  void* y;                // [T, H]
  float* residual_out;    // [T, H] receives h, may be nullptr
};
Error RmsNorm(const RmsNormParams& p);

// The input of a draft layer's projection: two matrices normalised apart and put side by side, row by row.
struct ConcatRmsNormParams {
  int32_t num_rows;     // T
  int32_t hidden_size;  // H
  DType dtype;          // of first, second and y
  float eps;
  const void* first;           // [T, H]
  const void* second;          // [T, H]
  const float* first_weight;   // [H]
  const float* second_weight;  // [H]
  void* y;                     // [T, 2 * H], a row is [first | second]
};
Error ConcatRmsNorm(const ConcatRmsNormParams& p);

// Two matrices side by side, row by row.
struct ConcatColumnsParams {
  int32_t num_rows;      // T
  int64_t first_bytes;   // of a row of first
  int64_t second_bytes;  // of a row of second
  const void* first;     // [T, first_bytes]
  const void* second;    // [T, second_bytes]
  void* y;               // [T, first_bytes + second_bytes]
};
Error ConcatColumns(const ConcatColumnsParams& p);

}  // namespace fdsd
