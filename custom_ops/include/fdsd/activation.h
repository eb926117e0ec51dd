#pragma once
#include "fdsd/status.h"

namespace fdsd {

// y = silu(gate) * up, where a row of gate_up is [gate | up].
struct SwigluParams {
  int32_t num_rows;           // T
  int32_t intermediate_size;  // I
  DType dtype;
  const void* gate_up;  // [T, 2 * I]
  void* y;              // [T, I]
};
Error Swiglu(const SwigluParams& p);

// y = gelu(gate) * up with the approximation by a hyperbolic tangent, where a row of gate_up is [gate | up].
struct GegluParams {
  int32_t num_rows;           // T
  int32_t intermediate_size;  // I
  DType dtype;
  const void* gate_up;  // [T, 2 * I]
  void* y;              // [T, I]
};
Error Geglu(const GegluParams& p);

// y = residual + silu(x).
struct AddSiluParams {
  int32_t num_rows;     // T
  int32_t num_columns;  // N
  DType dtype;
  const void* residual;  // [T, N]
  const void* x;         // [T, N]
  void* y;               // [T, N]
};
Error AddSilu(const AddSiluParams& p);

// y = gelu(x + bias), with the error function to within 1.5e-7.
struct BiasGeluParams {
  int32_t num_rows;     // T
  int32_t num_columns;  // N
  DType dtype;
  const void* x;      // [T, N]
  const float* bias;  // [N]
  void* y;            // [T, N]
};
Error BiasGelu(const BiasGeluParams& p);

// y = x * sigmoid(gate), where each gate is for N / G neighbouring columns.
struct SigmoidGateParams {
  int32_t num_rows;     // T
  int32_t num_columns;  // N
  int32_t num_gates;    // G, divides N
  DType dtype;
  const void* x;     // [T, N]
  const void* gate;  // [T, G]
  void* y;           // [T, N]
};
Error SigmoidGate(const SigmoidGateParams& p);

// y = cap * tanh(x / cap).
struct SoftcapParams {
  int32_t num_rows;     // T
  int32_t num_columns;  // N
  float cap;            // > 0
  const float* x;       // [T, N]
  float* y;             // [T, N]
};
Error Softcap(const SoftcapParams& p);

}  // namespace fdsd
