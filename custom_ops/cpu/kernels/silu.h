#pragma once
// Logistic gates.
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// x / (1 + e^-z). Exp clamps its argument, so no finite x overflows.
FDSD_INLINE F32x16 Gated(F32x16 x, F32x16 z) { return Div(x, Add(Set1(1.0f), Exp(Sub(Set1(0.0f), z)))); }

FDSD_INLINE F32x16 Silu(F32x16 x) { return Gated(x, x); }

FDSD_INLINE F32x16 Sigmoid(F32x16 x) { return Gated(Set1(1.0f), x); }

}  // namespace FDSD_ISA
}  // namespace fdsd
