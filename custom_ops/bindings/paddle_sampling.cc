#include "paddle/phi/api/include/api.h"
#include "paddle_binding.h"

namespace {
using namespace fdsd_paddle;  // NOLINT: a binding file is all bindings

constexpr DataType kInt32 = DataType::INT32;
constexpr DataType kFloat32 = DataType::FLOAT32;

std::vector<Tensor> TokenLogprobs(const Tensor& logits, const Tensor& token_ids, int num_top) {
  constexpr const char* kOp = "token_logprobs";
  const Shape shape = logits.shape();
  if (shape.size() != 2) Fail(kOp, "logits: expected [L, V], got " + ShapeText(shape));
  if (num_top < 0) Fail(kOp, "num_top: expected >= 0, got " + std::to_string(num_top));
  const auto empty = [&](const Shape& size, DataType dtype) {
    return paddle::experimental::empty(size, dtype, logits.place());
  };
  std::vector<Tensor> out = {empty({shape[0]}, kFloat32), empty({shape[0]}, kInt32), empty({shape[0], num_top}, kInt32),
                             empty({shape[0], num_top}, kFloat32)};
  const fdsd::TokenLogprobsParams p{
      static_cast<int32_t>(shape[0]),
      static_cast<int32_t>(shape[1]),
      num_top,
      Data<float>(kOp, "logits", logits, kFloat32, shape),
      Data<int32_t>(kOp, "token_ids", token_ids, kInt32, {shape[0]}),
      static_cast<float*>(out[0].data()),
      static_cast<int32_t*>(out[1].data()),
      static_cast<int32_t*>(out[2].data()),
      static_cast<float*>(out[3].data()),
  };
  Check(kOp, fdsd_token_logprobs(&p));
  return out;
}
}  // namespace

PD_BUILD_OP(fdsd_token_logprobs)
    .Inputs({"logits", "token_ids"})
    .Outputs({"logprobs", "ranks", "top_token_ids", "top_logprobs"})
    .Attrs({"num_top: int"})
    .SetKernelFn(PD_KERNEL(TokenLogprobs));
