#include "fdsd/activation.h"

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// x / (1 + e^-z). Exp clamps its argument, so no finite x overflows.
FDSD_INLINE F32x16 Gated(F32x16 x, F32x16 z) { return Div(x, Add(Set1(1.0f), Exp(Sub(Set1(0.0f), z)))); }

FDSD_INLINE F32x16 Silu(F32x16 x) { return Gated(x, x); }

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3).
FDSD_INLINE F32x16 GeluTanh(F32x16 x) {
  constexpr float kLinear = 1.5957691216057308f;
  constexpr float kCubic = 0.071354816272600960f;
  return Gated(x, Mul(x, Fma(Mul(x, x), Set1(kCubic), Set1(kLinear))));
}

// y[i] = f(x[i], z[i]) for a row.
template <typename T, typename F>
FDSD_INLINE void MapRow(const T* x, const T* z, int width, T* y, const F& f) {
  const int full = width / kLanes * kLanes;
  for (int i = 0; i < full; i += kLanes) Store(f(Load(x + i), Load(z + i)), y + i);
  const int rest = width - full;
  if (rest > 0) StorePartial(f(LoadPartial(x + full, rest), LoadPartial(z + full, rest)), y + full, rest);
}

template <typename T, typename Params, typename Activation>
void GateRow(const Params& p, int64_t row, const Activation& activation) {
  const int width = p.intermediate_size;
  const T* gate = static_cast<const T*>(p.gate_up) + row * 2 * width;
  MapRow(gate, gate + width, width, static_cast<T*>(p.y) + row * width,
         [&](F32x16 g, F32x16 up) { return Mul(activation(g), up); });
}

template <typename Params, typename Activation>
Error RunGate(const Params& p, const Activation& activation) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number";
  // Three elements moved; the exponential makes each cost as much as several.
  ParallelForRows(p.num_rows, p.intermediate_size * int64_t{24}, [&](int64_t row) {
    if (p.dtype == DType::kFloat32) {
      GateRow<float>(p, row, activation);
    } else {
      GateRow<bf16>(p, row, activation);
    }
  });
  return nullptr;
}

}  // namespace

Error Swiglu(const SwigluParams& p) {
  return RunGate(p, [](F32x16 x) { return Silu(x); });
}

Error Geglu(const GegluParams& p) {
  return RunGate(p, [](F32x16 x) { return GeluTanh(x); });
}

Error Softcap(const SoftcapParams& p) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.num_columns <= 0) return "num_columns: expected a positive number";
  if (!(p.cap > 0.0f)) return "cap: expected a positive number";
  ParallelForRows(p.num_rows, p.num_columns * int64_t{24}, [&](int64_t row) {
    const float* const x = p.x + row * p.num_columns;
    const F32x16 cap = Set1(p.cap);
    const F32x16 twice = Set1(2.0f / p.cap);
    // tanh(u) = 2 / (1 + e^-2u) - 1
    MapRow(x, x, p.num_columns, p.y + row * p.num_columns,
           [&](F32x16 v, F32x16) { return Mul(cap, Sub(Gated(Set1(2.0f), Mul(v, twice)), Set1(1.0f))); });
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
