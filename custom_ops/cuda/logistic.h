#pragma once
// Logistic gates.
#include "device.h"

namespace fdsd::cuda {

// x / (1 + e^-z)
__device__ __forceinline__ float Gated(float x, float z) {
  constexpr float kMaxExponent = 88.0f;  // e^88 is finite: no finite x overflows
  return x / (1.0f + expf(fminf(-z, kMaxExponent)));
}

struct Silu {
  __device__ float operator()(float x) const { return Gated(x, x); }
};

}  // namespace fdsd::cuda
