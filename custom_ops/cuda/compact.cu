#include "fdsd/attention.h"
#include "kv_layout.h"
#include "numbers.h"
#include "ops.h"
#include "row_copy.h"

namespace fdsd::cuda {
namespace {

struct PathArrays {
  DevicePtr<const int32_t> cu_num_logits;
  DevicePtr<const int32_t> cu_num_output;
  DevicePtr<const int32_t> output_rows;
  DevicePtr<const int32_t> logits_indices;

  explicit PathArrays(const VerifiedPaths& p)
      : cu_num_logits(p.cu_num_logits),
        cu_num_output(p.cu_num_output),
        output_rows(p.output_rows),
        logits_indices(p.logits_indices) {}

  // visit(from, to): the tokens of the step whose place another one takes, in an order that loses none.
  template <typename Visit>
  __device__ __forceinline__ void ForEachMove(int r, const Visit& visit) const {
    int32_t place = cu_num_logits[r];
    for (int32_t o = cu_num_output[r]; o < cu_num_output[r + 1]; ++o, ++place) {
      const int32_t row = output_rows[o];
      if (row != place) visit(logits_indices[row], logits_indices[place]);
    }
  }
};

// Block (r, head): the kept tokens of a request in one KV head, of rows of `Unit`s. Each thread moves its own units,
// one token after the other.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void CompactKvKernel(KvShape shape, int32_t units_per_row, PathArrays paths,
                                                                DevicePtr<const int64_t> slot_mapping,
                                                                DevicePtr<Unit> k, DevicePtr<Unit> v,
                                                                DevicePtr<float> k_scale, DevicePtr<float> v_scale) {
  paths.ForEachMove(static_cast<int>(blockIdx.x), [&](int32_t from_token, int32_t to_token) {
    const int64_t from = shape.Index(slot_mapping[from_token], blockIdx.y);
    const int64_t to = shape.Index(slot_mapping[to_token], blockIdx.y);
#pragma unroll 1  // at most two rounds in practice; several at a time spill registers
    for (int i = threadIdx.x; i < units_per_row; i += kCopyThreads) {
      k[to * units_per_row + i] = k[from * units_per_row + i];
      if (v != nullptr) v[to * units_per_row + i] = v[from * units_per_row + i];
    }
    if (threadIdx.x != 0 || k_scale == nullptr) return;
    k_scale[to] = static_cast<float>(k_scale[from]);
    v_scale[to] = static_cast<float>(v_scale[from]);
  });
}

// Block (r, part): kCopyThreads neighbouring units of a request's rows.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void CompactRowsKernel(int64_t units_per_row, PathArrays paths,
                                                                  DevicePtr<Unit> rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kCopyThreads + threadIdx.x;
  if (i >= units_per_row) return;
  paths.ForEachMove(static_cast<int>(blockIdx.x),
                    [&](int32_t from, int32_t to) { rows[to * units_per_row + i] = rows[from * units_per_row + i]; });
}

int64_t ElementBytes(KvDType dtype) {
  if (dtype == KvDType::kFloat32) return 4;
  return dtype == KvDType::kInt8 || dtype == KvDType::kFloat8 ? 1 : 2;
}

}  // namespace

Error CompactKv(const CompactKvParams& p, Stream stream) {
  if (const Error error = CheckKvStorage(p.cache); error != nullptr) return error;
  if (p.paths.num_requests < 0) return "num_requests: expected no negative number";
  const int64_t row_bytes = p.cache.head_dim * ElementBytes(p.cache.kv_dtype);
  const void* const rows[] = {p.cache.k, p.cache.v};
  const LaunchShape launch{
      dim3(static_cast<unsigned>(p.paths.num_requests), static_cast<unsigned>(p.cache.num_kv_heads)),
      dim3(kCopyThreads)};
  return WithCopyUnit(row_bytes, rows, [&]<typename Unit>(Unit) {
    return Launch<CompactKvKernel<Unit>>(
        launch, stream, ShapeOf(p.cache), static_cast<int32_t>(row_bytes / static_cast<int64_t>(sizeof(Unit))),
        PathArrays(p.paths), DevicePtr<const int64_t>(p.slot_mapping), DevicePtr<Unit>(p.cache.k),
        DevicePtr<Unit>(p.cache.v), DevicePtr<float>(p.cache.k_scale), DevicePtr<float>(p.cache.v_scale));
  });
}

Error CompactRows(const CompactRowsParams& p, Stream stream) {
  if (p.paths.num_requests < 0) return "num_requests: expected no negative number";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  const void* const rows[] = {p.rows};
  return WithCopyUnit(p.row_bytes, rows, [&]<typename Unit>(Unit) {
    const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
    const int64_t num_parts = DivideUp(units, kCopyThreads);
    if (num_parts > 65535) return Error{"row_bytes: expected rows of at most 65535 * 128 units, got more"};
    const LaunchShape launch{dim3(static_cast<unsigned>(p.paths.num_requests), static_cast<unsigned>(num_parts)),
                             dim3(kCopyThreads)};
    return Launch<CompactRowsKernel<Unit>>(launch, stream, units, PathArrays(p.paths), DevicePtr<Unit>(p.rows));
  });
}

}  // namespace fdsd::cuda
