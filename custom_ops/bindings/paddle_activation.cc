#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> Swiglu(const Tensor& gate_up) {
  constexpr const char* kOp = "swiglu";
  const Shape shape = gate_up.shape();
  if (shape.size() != 2 || shape[1] % 2 != 0) Fail(kOp, "gate_up: expected [T, 2 * I], got " + ShapeText(shape));
  Tensor y = paddle::experimental::empty({shape[0], shape[1] / 2}, gate_up.dtype(), gate_up.place());
  const fdsd::SwigluParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1] / 2),
      ToDType(kOp, "gate_up", gate_up.dtype()),
      Data<void>(kOp, "gate_up", gate_up, gate_up.dtype(), shape),
      y.data(),
  };
  Check(kOp, fdsd_swiglu(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_swiglu).Inputs({"gate_up"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(Swiglu));
