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

std::vector<Tensor> ConcatRmsNorm(const Tensor& first, const Tensor& second, const Tensor& first_weight,
                                  const Tensor& second_weight, float eps) {
  constexpr const char* kOp = "concat_rms_norm";
  const Shape shape = first.shape();
  if (shape.size() != 2) Fail(kOp, "first: expected [T, H], got " + ShapeText(shape));
  Tensor y = paddle::experimental::empty({shape[0], 2 * shape[1]}, first.dtype(), first.place());
  const fdsd::ConcatRmsNormParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1]),
      ToDType(kOp, "first", first.dtype()),
      eps,
      Data<void>(kOp, "first", first, first.dtype(), shape),
      Data<void>(kOp, "second", second, first.dtype(), shape),
      Data<float>(kOp, "first_weight", first_weight, DataType::FLOAT32, {shape[1]}),
      Data<float>(kOp, "second_weight", second_weight, DataType::FLOAT32, {shape[1]}),
      y.data(),
  };
  Check(kOp, fdsd_concat_rms_norm(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_rms_norm)
    .Inputs({"x", "weight", paddle::Optional("residual")})
    .Outputs({"y", "residual_out"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(RmsNorm));

PD_BUILD_OP(fdsd_concat_rms_norm)
    .Inputs({"first", "second", "first_weight", "second_weight"})
    .Outputs({"y"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(ConcatRmsNorm));
