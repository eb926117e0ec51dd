#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

std::vector<Tensor> GatherOutputRows(const Tensor& x, const Tensor& indices) {
  constexpr const char* kOp = "gather_output_rows";
  const Shape shape = x.shape();
  if (shape.size() != 2) Fail(kOp, "x: expected [T, H], got " + ShapeText(shape));
  const int64_t num_rows_out = indices.numel();
  Tensor y = paddle::experimental::empty({num_rows_out, shape[1]}, x.dtype(), x.place());
  const fdsd::GatherOutputRowsParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(num_rows_out),
      shape[1] * static_cast<int64_t>(phi::SizeOf(x.dtype())),
      Data<void>(kOp, "x", x, x.dtype(), shape),
      Data<int32_t>(kOp, "indices", indices, DataType::INT32, {-1}),
      y.data(),
  };
  Check(kOp, fdsd_gather_output_rows(&p));
  return {y};
}
}  // namespace

PD_BUILD_OP(fdsd_gather_output_rows).Inputs({"x", "indices"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(GatherOutputRows));
