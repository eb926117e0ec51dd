#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> Linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int out_features,
                           int format, bool float32_out) {
  constexpr const char* kOp = "linear";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [M, K], got " + ShapeText(shape));
  const int32_t in_features = static_cast<int32_t>(shape[1]);
  const int64_t num_bytes = fdsd_packed_linear_bytes(in_features, out_features, format);
  const fdsd::DType y_dtype = float32_out ? fdsd::DType::kFloat32 : fdsd::DType::kBFloat16;
  Tensor y = paddle::experimental::empty({shape[0], out_features}, FromDType(y_dtype), x.place());
  const fdsd::LinearParams p{
      static_cast<int32_t>(shape[0]),
      in_features,
      out_features,
      static_cast<fdsd::LinearFormat>(format),
      ToDType(kOp, "x", x.dtype()),
      y_dtype,
      Data<void>(kOp, "x", x, x.dtype(), shape),
      Data<void>(kOp, "packed", packed, DataType::UINT8, {num_bytes}),
      OptionalData<float>(kOp, "bias", bias, DataType::FLOAT32, {out_features}),
      y.data(),
  };
  Check(kOp, fdsd_linear(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_linear)
    .Inputs({"x", "packed", paddle::Optional("bias")})
    .Outputs({"y"})
    .Attrs({"out_features: int", "format: int", "float32_out: bool"})
    .SetKernelFn(PD_KERNEL(Linear));
