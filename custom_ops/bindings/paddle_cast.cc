#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> Cast(const Tensor& x, bool float32_out) {
  constexpr const char* kOp = "cast";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [T, N], got " + ShapeText(shape));
  const fdsd::DType y_dtype = float32_out ? fdsd::DType::kFloat32 : fdsd::DType::kBFloat16;
  Tensor y = paddle::experimental::empty(shape, FromDType(y_dtype), x.place());
  const fdsd::CastParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1]),
      ToDType(kOp, "x", x.dtype()),
      y_dtype,
      Data<void>(kOp, "x", x, x.dtype(), shape),
      y.data(),
  };
  Check(kOp, fdsd_cast(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_cast).Inputs({"x"}).Outputs({"y"}).Attrs({"float32_out: bool"}).SetKernelFn(PD_KERNEL(Cast));
