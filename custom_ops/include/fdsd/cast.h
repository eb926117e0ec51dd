#pragma once
#include "fdsd/status.h"

namespace fdsd {

// y = x in another type; bfloat16 and float16 are rounded to nearest, ties to even. Above 65504 float16 is infinite.
struct CastParams {
  int32_t num_rows;     // T
  int32_t num_columns;  // N
  DType x_dtype;
  DType y_dtype;
  const void* x;  // [T, N]
  void* y;        // [T, N]
};
Error Cast(const CastParams& p);

}  // namespace fdsd
