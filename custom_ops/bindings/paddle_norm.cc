#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> RmsNorm(const Tensor& x, const Tensor& weight, const OptionalTensor& residual, float eps) {
  constexpr const char* kOp = "rms_norm";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [T, H], got " + ShapeText(shape));
  Tensor y = paddle::experimental::empty(shape, x.dtype(), x.place());
  Tensor h = paddle::experimental::empty(shape, DataType::FLOAT32, x.place());
  const fdsd::RmsNormParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1]),
      ToDType(kOp, "x", x.dtype()),
      eps,
      Data<void>(kOp, "x", x, x.dtype(), shape),
      OptionalData<float>(kOp, "residual", residual, DataType::FLOAT32, shape),
      Data<float>(kOp, "weight", weight, DataType::FLOAT32, {shape[1]}),
      y.data(),
      static_cast<float*>(h.data()),
  };
  Check(kOp, fdsd_rms_norm(&p));
  return {y, h};
}
}  // namespace

PD_BUILD_OP(fdsd_rms_norm)
    .Inputs({"x", "weight", paddle::Optional("residual")})
    .Outputs({"y", "residual_out"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(RmsNorm));
