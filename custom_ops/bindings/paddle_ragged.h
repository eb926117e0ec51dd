#pragma once
// Checks of ragged tensors.
#include "paddle_binding.h"

namespace fdsd_paddle {

// Offsets i32[count + 1] into an array of `size` elements. That they never decrease is the kernel's check.
inline int32_t* OffsetsData(const char* op, const char* name, const Tensor& tensor, int64_t count, int64_t size) {
  int32_t* cu = Data<int32_t>(op, name, tensor, DataType::INT32, {count + 1});
  if (cu[count] != size)
    Fail(op, std::string(name) + ": expected " + std::to_string(size) + " last, got " + std::to_string(cu[count]));
  return cu;
}

}  // namespace fdsd_paddle
