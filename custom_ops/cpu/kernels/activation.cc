#include "fdsd/activation.h"

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// gate / (1 + e^-gate) * up. Exp clamps its argument, so no finite gate overflows.
FDSD_INLINE F32x16 SiluMul(F32x16 gate, F32x16 up) {
  const F32x16 denominator = Add(Set1(1.0f), Exp(Sub(Set1(0.0f), gate)));
  return Mul(Div(gate, denominator), up);
}

template <typename T>
void SwigluRow(const SwigluParams& p, int64_t row) {
  const int width = p.intermediate_size;
  const T* gate = static_cast<const T*>(p.gate_up) + row * 2 * width;
  const T* up = gate + width;
  T* y = static_cast<T*>(p.y) + row * width;
  const int full = width / kLanes * kLanes;
  for (int i = 0; i < full; i += kLanes) Store(SiluMul(Load(gate + i), Load(up + i)), y + i);
  const int rest = width - full;
  if (rest > 0) StorePartial(SiluMul(LoadPartial(gate + full, rest), LoadPartial(up + full, rest)), y + full, rest);
}

}  // namespace

Error Swiglu(const SwigluParams& p) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number";
  // Three elements moved; the exponential makes each cost as much as several.
  ParallelForRows(p.num_rows, p.intermediate_size * int64_t{24}, [&](int64_t row) {
    if (p.dtype == DType::kFloat32) {
      SwigluRow<float>(p, row);
    } else {
      SwigluRow<bf16>(p, row);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
