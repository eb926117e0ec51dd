#include "fdsd/norm.h"

#include <cstring>

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// One row: h = x * x_scale (+ residual), written to `h` when it is wanted; y = h / sqrt(mean(h^2) + eps) * weight.
template <typename T>
struct NormRow {
  const T* x;
  float x_scale;
  const float* residual;  // may be nullptr
  const float* weight;
  T* y;
  float* h;  // needed for the second pass, also where no caller wants it

  void Run(int32_t hidden_size, float eps) const {
    F32x16 squares = Set1(0.0f);
    for (int i = 0; i < hidden_size; i += kLanes) {
      const int n = std::min(kLanes, hidden_size - i);
      F32x16 v = Mul(n == kLanes ? Load(x + i) : LoadPartial(x + i, n), Set1(x_scale));
      if (residual != nullptr) v = Add(v, n == kLanes ? Load(residual + i) : LoadPartial(residual + i, n));
      squares = Fma(v, v, squares);
      n == kLanes ? Store(v, h + i) : StorePartial(v, h + i, n);
    }
    const float scale = 1.0f / std::sqrt(ReduceAdd(squares) / static_cast<float>(hidden_size) + eps);
    for (int i = 0; i < hidden_size; i += kLanes) {
      const int n = std::min(kLanes, hidden_size - i);
      if (n == kLanes) {
        Store(Mul(Mul(Load(h + i), Set1(scale)), Load(weight + i)), y + i);
      } else {
        StorePartial(Mul(Mul(LoadPartial(h + i, n), Set1(scale)), LoadPartial(weight + i, n)), y + i, n);
      }
    }
  }
};

template <typename T>
void RunRmsNorm(const RmsNormParams& p) {
  const int64_t row_bytes = p.hidden_size * static_cast<int64_t>(2 * sizeof(T) + 2 * sizeof(float));
  ParallelForRows(p.num_rows, row_bytes, [&](int64_t row) {
    const int64_t offset = row * p.hidden_size;
    float* const h =
        p.residual_out == nullptr ? ScratchArray<float>(Scratch::kTask, p.hidden_size) : p.residual_out + offset;
    NormRow<T>{
        static_cast<const T*>(p.x) + offset, p.x_scale, p.residual == nullptr ? nullptr : p.residual + offset, p.weight,
        static_cast<T*>(p.y) + offset,       h}
        .Run(p.hidden_size, p.eps);
  });
}

template <typename T>
void RunConcatRmsNorm(const ConcatRmsNormParams& p) {
  ParallelForRows(p.num_rows, p.hidden_size * static_cast<int64_t>(4 * sizeof(T)), [&](int64_t row) {
    const int64_t offset = row * p.hidden_size;
    T* const y = static_cast<T*>(p.y) + 2 * offset;
    float* const h = ScratchArray<float>(Scratch::kTask, p.hidden_size);
    NormRow<T>{static_cast<const T*>(p.first) + offset, 1.0f, nullptr, p.first_weight, y, h}.Run(p.hidden_size, p.eps);
    NormRow<T>{static_cast<const T*>(p.second) + offset, 1.0f, nullptr, p.second_weight, y + p.hidden_size, h}.Run(
        p.hidden_size, p.eps);
  });
}

}  // namespace

Error RmsNorm(const RmsNormParams& p) {
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number";
  if (p.dtype == DType::kFloat32) {
    RunRmsNorm<float>(p);
  } else {
    RunRmsNorm<bf16>(p);
  }
  return nullptr;
}

Error ConcatRmsNorm(const ConcatRmsNormParams& p) {
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number";
  if (p.dtype == DType::kFloat32) {
    RunConcatRmsNorm<float>(p);
  } else {
    RunConcatRmsNorm<bf16>(p);
  }
  return nullptr;
}

Error ConcatColumns(const ConcatColumnsParams& p) {
  if (p.first_bytes < 0 || p.second_bytes < 0) return "row bytes: expected >= 0, got a negative size";
  const int64_t row_bytes = p.first_bytes + p.second_bytes;
  ParallelForRows(p.num_rows, row_bytes, [&](int64_t row) {
    char* const y = static_cast<char*>(p.y) + row * row_bytes;
    std::memcpy(y, static_cast<const char*>(p.first) + row * p.first_bytes, static_cast<size_t>(p.first_bytes));
    std::memcpy(y + p.first_bytes, static_cast<const char*>(p.second) + row * p.second_bytes,
                static_cast<size_t>(p.second_bytes));
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
