#include "fdsd/norm.h"

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

template <typename T>
void NormRow(const RmsNormParams& p, int64_t row) {
  const int64_t offset = row * p.hidden_size;
  const T* x = static_cast<const T*>(p.x) + offset;
  const float* residual = p.residual == nullptr ? nullptr : p.residual + offset;
  T* y = static_cast<T*>(p.y) + offset;
  // h needs a second pass; without residual_out it goes to scratch.
  float* h = p.residual_out == nullptr ? ScratchArray<float>(Scratch::kTask, p.hidden_size) : p.residual_out + offset;
  F32x16 squares = Set1(0.0f);
  for (int i = 0; i < p.hidden_size; i += kLanes) {
    const int n = std::min(kLanes, p.hidden_size - i);
    F32x16 v = n == kLanes ? Load(x + i) : LoadPartial(x + i, n);
    if (residual != nullptr) v = Add(v, n == kLanes ? Load(residual + i) : LoadPartial(residual + i, n));
    squares = Fma(v, v, squares);
    StorePartial(v, h + i, n);
  }
  const float scale = 1.0f / std::sqrt(ReduceAdd(squares) / static_cast<float>(p.hidden_size) + p.eps);
  for (int i = 0; i < p.hidden_size; i += kLanes) {
    const int n = std::min(kLanes, p.hidden_size - i);
    const F32x16 v = Mul(Mul(LoadPartial(h + i, n), Set1(scale)), LoadPartial(p.weight + i, n));
    StorePartial(v, y + i, n);
  }
}

}  // namespace

Error RmsNorm(const RmsNormParams& p) {
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number";
  ParallelFor(p.num_rows, [&](int64_t row) {
    if (p.dtype == DType::kFloat32) {
      NormRow<float>(p, row);
    } else {
      NormRow<bf16>(p, row);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
