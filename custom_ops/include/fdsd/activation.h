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

}  // namespace fdsd
