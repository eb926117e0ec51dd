#include "fdsd/activation.h"

#include "silu.h"
#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr float kClampedSlope = 1.702f;

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3).
FDSD_INLINE F32x16 GeluTanh(F32x16 x) {
  constexpr float kLinear = 1.5957691216057308f;
  constexpr float kCubic = 0.071354816272600960f;
  return Gated(x, Mul(x, Fma(Mul(x, x), Set1(kCubic), Set1(kLinear))));
}

// x * Phi(x) = max(x, 0) - |x| * q / 2, where Phi is the normal distribution and q = 1 - erf(|x| / sqrt(2)).
// Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
FDSD_INLINE F32x16 Gelu(F32x16 x) {
  const F32x16 size = Max(Sub(Set1(0.0f), x), x);
  const F32x16 t = Div(Set1(1.0f), Fma(size, Set1(0.231641888f), Set1(1.0f)));
  F32x16 q = Set1(1.061405429f);
  q = Fma(q, t, Set1(-1.453152027f));
  q = Fma(q, t, Set1(1.421413741f));
  q = Fma(q, t, Set1(-0.284496736f));
  q = Fma(q, t, Set1(0.254829592f));
  q = Mul(Mul(q, t), Exp(Mul(Mul(x, x), Set1(-0.5f))));
  return Sub(Max(Set1(0.0f), x), Mul(Mul(size, Set1(0.5f)), q));
}

// y[i] = f(x[i], z[i]) for a row.
template <typename T, typename Z, typename F>
FDSD_INLINE void MapRow(const T* x, const Z* z, int width, T* y, const F& f) {
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

// run(T{}, row) for every row of `width` outputs of type T.
template <typename Params, typename F>
Error ForRows(const Params& p, int32_t width, const F& run) {
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  // Three elements moved; the exponential makes each cost as much as several.
  ParallelForRows(p.num_rows, width * int64_t{24}, [&](int64_t row) {
    if (p.dtype == DType::kFloat32) {
      run(float{}, row);
    } else {
      run(bf16{}, row);
    }
  });
  return nullptr;
}

template <typename Params, typename Activation>
Error RunGate(const Params& p, const Activation& activation) {
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number";
  return ForRows(p, p.intermediate_size, [&]<typename T>(T, int64_t row) { GateRow<T>(p, row, activation); });
}

}  // namespace

Error Swiglu(const SwigluParams& p) {
  return RunGate(p, [](F32x16 x) { return Silu(x); });
}

// Of every row of gate_up; the sizes are those that Swiglu takes. For moe.cc.
void ClampedSwiglu(const SwigluParams& p, float limit) {
  const int width = p.intermediate_size;
  const F32x16 most = Set1(limit);
  const F32x16 least = Set1(-limit);
  ForRows(p, width, [&]<typename T>(T, int64_t row) {
    const T* gate = static_cast<const T*>(p.gate_up) + row * 2 * width;
    MapRow(gate, gate + width, width, static_cast<T*>(p.y) + row * width, [&](F32x16 g, F32x16 up) {
      // Min and Max return the second operand where one is NaN.
      const F32x16 cut = Min(most, g);
      return Mul(Gated(cut, Mul(cut, Set1(kClampedSlope))), Add(Max(least, Min(most, up)), Set1(1.0f)));
    });
  });
}

Error Geglu(const GegluParams& p) {
  return RunGate(p, [](F32x16 x) { return GeluTanh(x); });
}

Error AddSilu(const AddSiluParams& p) {
  if (p.num_columns <= 0) return "num_columns: expected a positive number";
  return ForRows(p, p.num_columns, [&]<typename T>(T, int64_t row) {
    const int64_t i = row * p.num_columns;
    MapRow(static_cast<const T*>(p.residual) + i, static_cast<const T*>(p.x) + i, p.num_columns,
           static_cast<T*>(p.y) + i, [](F32x16 residual, F32x16 x) { return Add(residual, Silu(x)); });
  });
}

Error BiasGelu(const BiasGeluParams& p) {
  if (p.num_columns <= 0) return "num_columns: expected a positive number";
  return ForRows(p, p.num_columns, [&]<typename T>(T, int64_t row) {
    const int64_t i = row * p.num_columns;
    MapRow(static_cast<const T*>(p.x) + i, p.bias, p.num_columns, static_cast<T*>(p.y) + i,
           [](F32x16 x, F32x16 bias) { return Gelu(Add(x, bias)); });
  });
}

Error SigmoidGate(const SigmoidGateParams& p) {
  if (p.num_gates <= 0) return "num_gates: expected a positive number";
  if (p.num_columns <= 0 || p.num_columns % p.num_gates != 0)
    return "num_columns: expected a positive multiple of num_gates";
  const int32_t width = p.num_columns / p.num_gates;
  return ForRows(p, p.num_columns, [&]<typename T>(T, int64_t row) {
    const T* const x = static_cast<const T*>(p.x) + row * p.num_columns;
    const T* const gate = static_cast<const T*>(p.gate) + row * p.num_gates;
    T* const y = static_cast<T*>(p.y) + row * p.num_columns;
    if (width == 1) {
      MapRow(x, gate, p.num_columns, y, [](F32x16 v, F32x16 g) { return Gated(v, g); });
      return;
    }
    for (int32_t g = 0; g < p.num_gates; ++g) {
      const F32x16 z = Set1(ToFloat(gate[g]));
      const int64_t first = int64_t{g} * width;
      MapRow(x + first, x + first, width, y + first, [&](F32x16 v, F32x16) { return Gated(v, z); });
    }
  });
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
