#pragma once
// What the Paddle operators share. They are made from the declarations of ops. They read what Paddle knows (type,
// shape, place), fill the params struct and call the C function; they compute nothing.
#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "fdsd/status.h"
#include "paddle/common/enforce.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/api.h"
#include "paddle/phi/api/include/tensor.h"

namespace fdsd_paddle {

using paddle::DataType;
using paddle::Tensor;
using OptionalTensor = paddle::optional<Tensor>;
using Shape = std::vector<int64_t>;
using Texts = std::vector<const char*>;

constexpr int64_t kUnknown = -1;  // a size that the argument tells

[[noreturn]] inline void Fail(const std::string& op, const std::string& what) {
  PADDLE_THROW(common::errors::InvalidArgument("%s: %s", op, what));  // a ValueError in Python
}

inline void Run(const char* op, fdsd::Error error) {
  if (error != nullptr) Fail(op, error);
}

// A type by its name in Python.
inline std::string DTypeText(DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

// [3, num_rows]: sizes, or their texts where they are unknown.
inline std::string ShapeText(const Shape& shape, const Texts& texts = {}) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i == 0 ? "" : ", ") + (i < texts.size() && shape[i] == kUnknown ? texts[i] : std::to_string(shape[i]));
  return text + "]";
}

[[noreturn]] inline void FailShape(const char* op, const char* name, const Shape& got, const Shape& expected,
                                   const Texts& texts) {
  Fail(op, std::string(name) + ": expected shape " + ShapeText(expected, texts) + ", got " + ShapeText(got));
}

// Shape of a tensor of one of these types with these sizes.
inline Shape Verify(const char* op, const char* name, const Tensor& tensor, const std::vector<DataType>& dtypes,
                    const Shape& expected, const Texts& texts) {
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype()) == dtypes.end()) {
    std::string allowed;
    for (DataType dtype : dtypes) allowed += (allowed.empty() ? "" : " or ") + DTypeText(dtype);
    Fail(op, std::string(name) + ": expected " + allowed + ", got " + DTypeText(tensor.dtype()));
  }
  const Shape got = tensor.shape();
  bool same = got.size() == expected.size();
  for (size_t i = 0; same && i < got.size(); ++i) same = expected[i] == kUnknown || expected[i] == got[i];
  if (!same) FailShape(op, name, got, expected, texts);
  if (!tensor.is_cpu()) Fail(op, std::string(name) + ": expected a CPU tensor, got one elsewhere");
  return got;
}

inline int64_t ElementBytes(const Tensor& tensor) { return static_cast<int64_t>(phi::SizeOf(tensor.dtype())); }

// A quotient, whose rest is lost; that by 0 is 0.
inline int64_t Quotient(int64_t a, int64_t b) { return b == 0 ? 0 : a / b; }

// A negative size is none; the kernel will refuse it.
inline Tensor Empty(Shape shape, DataType dtype) {
  for (int64_t& size : shape) size = std::max<int64_t>(size, 0);
  return paddle::experimental::empty(shape, dtype, phi::CPUPlace());
}

inline DataType DTypeOfCode(int code) {
  return code == 0 ? DataType::FLOAT32 : code == 1 ? DataType::BFLOAT16 : DataType::FLOAT16;
}
inline int64_t DTypeCode(DataType dtype) {
  switch (dtype) {
    case DataType::FLOAT32:
      return 0;
    case DataType::BFLOAT16:
      return 1;
    case DataType::FLOAT16:
      return 4;
    default:
      return 2;
  }
}

template <typename T, typename Number>
void Set(T* field, Number value) {
  *field = static_cast<T>(value);
}

template <typename T>
void Point(T** field, const Tensor& tensor) {
  *field = static_cast<T*>(const_cast<void*>(tensor.data()));
}

template <typename T>
void Point(T** field, const OptionalTensor& tensor) {
  if (tensor) Point(field, *tensor);
}

}  // namespace fdsd_paddle

extern "C" int64_t fdsd_packed_linear_bytes(int32_t in_features, int32_t out_features, int32_t format,
                                            int32_t num_slices, int32_t slice_unit);
