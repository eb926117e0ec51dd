#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> MoeFfn(const Tensor& x, const Tensor& router_weight, const Tensor& gate_up, const Tensor& down,
                           const OptionalTensor& selection_bias, const OptionalTensor& shared, int intermediate_size,
                           int format, int top_k, bool normalize, float norm_min) {
  constexpr const char* kOp = "moe_ffn";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [T, H], got " + ShapeText(shape));
  const Shape router_shape = router_weight.shape();
  if (router_shape.size() != 2) Fail(kOp, "router_weight: expected [E, H], got " + ShapeText(router_shape));
  const int64_t num_experts = router_shape[0];
  const int32_t hidden_size = static_cast<int32_t>(shape[1]);
  const int64_t gate_up_bytes = num_experts * fdsd_packed_linear_bytes(hidden_size, 2 * intermediate_size, format);
  const int64_t down_bytes = num_experts * fdsd_packed_linear_bytes(intermediate_size, hidden_size, format);
  Tensor y = paddle::experimental::empty(shape, x.dtype(), x.place());
  const fdsd::MoeFfnParams p{
      static_cast<int32_t>(shape[0]),
      hidden_size,
      intermediate_size,
      static_cast<int32_t>(num_experts),
      top_k,
      normalize ? 1 : 0,
      norm_min,
      ToDType(kOp, "x", x.dtype()),
      static_cast<fdsd::LinearFormat>(format),
      Data<void>(kOp, "x", x, x.dtype(), shape),
      Data<float>(kOp, "router_weight", router_weight, DataType::FLOAT32, {num_experts, shape[1]}),
      OptionalData<float>(kOp, "selection_bias", selection_bias, DataType::FLOAT32, {num_experts}),
      Data<void>(kOp, "gate_up", gate_up, DataType::UINT8, {gate_up_bytes}),
      Data<void>(kOp, "down", down, DataType::UINT8, {down_bytes}),
      OptionalData<void>(kOp, "shared", shared, x.dtype(), shape),
      y.data(),
  };
  Check(kOp, fdsd_moe_ffn(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_moe_ffn)
    .Inputs({"x", "router_weight", "gate_up", "down", paddle::Optional("selection_bias"), paddle::Optional("shared")})
    .Outputs({"y"})
    .Attrs({"intermediate_size: int", "format: int", "top_k: int", "normalize: bool", "norm_min: float"})
    .SetKernelFn(PD_KERNEL(MoeFfn));
