#pragma once
// Helpers of the Paddle bindings. A binding checks what Paddle knows (shape, dtype, place), fills the params struct and
// calls the C function; it computes nothing. The lean headers keep a binding's compile time near two seconds.
#include <string>
#include <vector>

#include "fdsd/c_api.h"
#include "paddle/common/enforce.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/tensor.h"

namespace fdsd_paddle {

using paddle::DataType;
using paddle::Tensor;
using OptionalTensor = paddle::optional<Tensor>;
using Shape = std::vector<int64_t>;

[[noreturn]] inline void Fail(const std::string& op, const std::string& what) {
  PADDLE_THROW(common::errors::InvalidArgument("%s: %s", op, what));  // a ValueError in Python
}

inline void Check(const char* op, fdsd::Error error) {
  if (error != nullptr) Fail(op, error);
}

inline std::string ShapeText(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// Address of a tensor that must have exactly this shape and type. -1 in `shape` matches any size.
template <typename T>
T* Data(const char* op, const char* name, const Tensor& tensor, DataType dtype, const Shape& shape) {
  const Shape got = tensor.shape();
  bool same = got.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = shape[i] == -1 || shape[i] == got[i];
  if (!same) Fail(op, std::string(name) + ": expected shape " + ShapeText(shape) + ", got " + ShapeText(got));
  if (tensor.dtype() != dtype) Fail(op, std::string(name) + ": unexpected dtype");
  if (!tensor.is_cpu()) Fail(op, std::string(name) + ": expected a CPU tensor");
  return const_cast<T*>(static_cast<const T*>(tensor.data()));
}

template <typename T>
T* OptionalData(const char* op, const char* name, const OptionalTensor& tensor, DataType dtype, const Shape& shape) {
  return tensor ? Data<T>(op, name, *tensor, dtype, shape) : nullptr;
}

inline fdsd::DType ToDType(const char* op, const char* name, DataType dtype) {
  if (dtype == DataType::FLOAT32) return fdsd::DType::kFloat32;
  if (dtype == DataType::BFLOAT16) return fdsd::DType::kBFloat16;
  Fail(op, std::string(name) + ": expected float32 or bfloat16");
}

inline DataType FromDType(fdsd::DType dtype) {
  return dtype == fdsd::DType::kFloat32 ? DataType::FLOAT32 : DataType::BFLOAT16;
}

}  // namespace fdsd_paddle
