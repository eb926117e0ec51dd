#pragma once
// How a token's experts are added: in the order of their ids, slice by slice, whatever ran them where.
#include <algorithm>

#include "linear_layout.h"
#include "linear_tile.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// The slice of experts that a position is in; slices begin at border(1), border(2), ...
template <typename Border>
FDSD_INLINE int32_t SliceOf(int64_t position, int32_t num_slices, Border&& border) {
  int32_t slice = num_slices - 1;
  while (position < border(slice)) --slice;
  return slice;
}

// sum += weight * y, both [size].
FDSD_INLINE void AddExpert(float weight, const float* y, int32_t size, float* sum) {
  const F32x16 factor = Set1(weight);
  for (int32_t i = 0; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    StorePartial(Fma(factor, LoadPartial(y + i, n), LoadPartial(sum + i, n)), sum + i, n);
  }
}

// 16 floats of every slice of a sum, added in their tree; a slice lies `stride` floats after the one before.
FDSD_INLINE F32x16 AddSlices(const float* sum, int32_t num_slices, int64_t stride, int n) {
  if (num_slices == 1) return LoadPartial(sum, n);
  const F32x16 left = Add(LoadPartial(sum, n), LoadPartial(sum + stride, n));
  if (num_slices == 2) return left;
  return Add(left, Add(LoadPartial(sum + 2 * stride, n), LoadPartial(sum + 3 * stride, n)));
}

// y = the slices' sum (+ shared), rounded once; all [size].
template <typename T, typename Y>
FDSD_INLINE void StoreExperts(const float* sum, int32_t num_slices, int64_t stride, const T* shared, int32_t size,
                              Y* y) {
  for (int32_t i = 0; i < size; i += kLanes) {
    const int n = std::min(kLanes, size - i);
    F32x16 v = AddSlices(sum + i, num_slices, stride, n);
    if (shared != nullptr) v = Add(v, LoadPartial(shared + i, n));
    StorePartial(v, y + i, n);
  }
}

// body(T{}, Y{}) with the types of x and y.
template <typename Body>
auto WithTypes(DType x, DType y, Body&& body) {
  const auto with_y = [&](auto t) { return y == DType::kFloat32 ? body(t, float{}) : body(t, bf16{}); };
  return x == DType::kFloat32 ? with_y(float{}) : with_y(bf16{});
}

}  // namespace FDSD_ISA
}  // namespace fdsd
