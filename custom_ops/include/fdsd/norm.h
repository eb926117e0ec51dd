#pragma once
#include "fdsd/status.h"

namespace fdsd {

// h = x (+ residual), kept in float32; y = h / sqrt(mean(h^2) + eps) * weight.
struct RmsNormParams {
  int32_t num_rows;     // T
  int32_t hidden_size;  // H
  DType dtype;          // of x and y
  float eps;
  const void* x;          // [T, H]
  const float* residual;  // [T, H], may be nullptr
  const float* weight;    // [H]
  void* y;                // [T, H]
  float* residual_out;    // [T, H] receives h, may be nullptr
};
Error RmsNorm(const RmsNormParams& p);

}  // namespace fdsd
