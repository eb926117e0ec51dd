// Experts that ranks share, on GPUs: what gives a rank's rows to the others, and what adds up the results. See
// expert_gpu.h.
#include <algorithm>

#include "expert_job.h"
#include "fdsd/experts.h"
#include "moe_check.h"
#include "runtime/status.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

// Rows of other parts are -0, which changes no number that it is added to. Block (row, part).
__global__ __launch_bounds__(kThreads) void FillKernel(int32_t num_columns, int32_t begin, int32_t end, DType dtype,
                                                       DevicePtr<uint8_t> y) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto i = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
  if (i < num_columns && (row < begin || row >= end)) StoreFloat(dtype, y, int64_t{row} * num_columns + i, -0.0f);
}

// The tokens of a part.
struct Part {
  int32_t begin;
  int32_t end;
};
template <typename Params>
Part PartOf(const Params& p) {
  return {static_cast<int32_t>(int64_t{p.num_tokens} * p.part / p.num_parts),
          static_cast<int32_t>(int64_t{p.num_tokens} * (p.part + 1) / p.num_parts)};
}

// What both ops require of the service; `gpu` stays nullptr where there is none.
template <typename Params>
Error CheckService(const Params& p, int32_t top_k, ExpertGpu** gpu, const ExpertServiceLayerParams** layer) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (p.num_parts < 1 || p.part < 0 || p.part >= p.num_parts) return "part: expected 0 to num_parts - 1, got another";
  if (p.service == 0) return nullptr;
  *gpu = FindExpertGpu(p.service);
  if (*gpu == nullptr) return "service: expected the handle of an open expert service on a GPU, got another";
  if (const Error error = (*gpu)->FindLayer(p.layer, layer)) return error;
  if (p.hidden_size != (*layer)->shape.hidden_size) return "x: expected rows of the layer's hidden_size, got others";
  if (p.dtype != (*layer)->shape.dtype) return "x: expected the layer's dtype, got another";
  if (top_k != (*layer)->top_k) return "top_k: expected that of the layer, got another";
  return nullptr;
}

int32_t NumPlaces(const ExpertGpu* gpu) { return gpu == nullptr ? 0 : gpu->group().num_ranks * gpu->group().num_slots; }

// The rows of a round, as many as fit, from `begin` on.
template <typename Params>
RoundRows RowsFrom(const Params& p, const ExpertGroup& group, const ExpertServiceLayerParams& layer, int32_t begin) {
  const int64_t row_bytes = p.hidden_size * ElementBytes(p.dtype);
  return {p.layer,
          layer.num_experts,
          layer.top_k,
          std::min(PartOf(p).end - begin, group.capacity),
          row_bytes,
          static_cast<const char*>(p.x) + begin * row_bytes,
          p.expert_ids + int64_t{begin} * layer.top_k};
}

// All is as large as the op needs; workspace nullptr: only to ask how large that is.
struct DispatchCall {
  Part part;
  Parts parts;
  RouterArrays router;
  RoundArrays round;

  DispatchCall(const DispatchExpertsParams& p, const ExpertGpu* gpu, void* workspace)
      : part(PartOf(p)),
        parts(workspace),
        router(RouterArraysOf(p.router, part.end - part.begin, p.num_experts, &parts)),
        round(int64_t{part.end - part.begin} * p.router.top_k, NumPlaces(gpu), &parts) {
    const int64_t first = int64_t{part.begin} * p.router.top_k;
    router.experts = DevicePtr<int32_t>(p.expert_ids + first);
    router.pair_weights = DevicePtr<float>(p.weights + first);
  }
};

Error CheckDispatch(const DispatchExpertsParams& p, ExpertGpu** gpu, const ExpertServiceLayerParams** layer) {
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (const Error error = CheckRouter(p.router, p.num_experts)) return error;
  if (const Error error = CheckService(p, p.router.top_k, gpu, layer)) return error;
  if (*layer != nullptr && (*layer)->num_experts != p.num_experts)
    return "router_weight: expected the layer's num_experts, got another number";
  return nullptr;
}

// Tokens of other parts have expert ids -1 and weights 0.
Error ClearChoice(const DispatchExpertsParams& p, Stream stream) {
  const auto bytes = static_cast<size_t>(p.num_tokens) * static_cast<size_t>(p.router.top_k) * sizeof(int32_t);
  const auto own = static_cast<cudaStream_t>(stream);
  if (Error error = TextOf(cudaMemsetAsync(p.expert_ids, 0xff, bytes, own))) return error;
  return TextOf(cudaMemsetAsync(p.weights, 0, bytes, own));
}

Error CheckCombine(const CombineExpertsParams& p, ExpertGpu** gpu, const ExpertServiceLayerParams** layer) {
  if (p.service == 0) return "service: expected the handle of an open expert service, got 0";
  if (p.num_slices != 1 && p.num_slices != 2 && p.num_slices != 4)
    return "num_slices: expected 1, 2 or 4, got another number";
  return CheckService(p, p.top_k, gpu, layer);
}

// The rows of a round, which were given.
template <typename T>
Error AddRound(const CombineExpertsParams& p, const ExpertGroup& group, int32_t num_experts, int32_t begin,
               int32_t num_rows, Stream stream) {
  const auto at = [&](const void* rows, DType dtype) -> const void* {
    const int64_t offset = int64_t{begin} * p.hidden_size * ElementBytes(dtype);
    return rows == nullptr ? nullptr : static_cast<const char*>(rows) + offset;
  };
  RouterShape shape{};
  shape.num_tokens = num_rows;
  shape.hidden_size = p.hidden_size;
  shape.num_local_experts = shape.num_experts = num_experts;
  shape.top_k = p.top_k;
  RouterArrays router{};
  const int64_t first = int64_t{begin} * p.top_k;
  router.experts = DevicePtr<int32_t>(const_cast<int32_t*>(p.expert_ids + first));
  router.pair_weights = DevicePtr<float>(const_cast<float*>(p.weights + first));
  router.rows = DevicePtr<int32_t>(group.pair_of);
  const CombinePlace place{
      p.num_slices, p.y_dtype, group.results, nullptr, at(p.shared, p.dtype), const_cast<void*>(at(p.y, p.y_dtype))};
  return CombineTokens<T>(shape, router, place, stream);
}

}  // namespace

int64_t DispatchExpertsWorkspaceBytes(const DispatchExpertsParams& p) {
  ExpertGpu* gpu = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  return CheckDispatch(p, &gpu, &layer) == nullptr ? DispatchCall(p, gpu, nullptr).parts.num_bytes() : 0;
}

Error DispatchExperts(const DispatchExpertsParams& p, void* workspace, Stream stream) {
  ExpertGpu* gpu = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (const Error error = CheckDispatch(p, &gpu, &layer)) return error;
  const DispatchCall call(p, gpu, workspace);
  if (p.num_parts > 1)
    if (Error error = ClearChoice(p, stream)) return error;
  const int32_t num_tokens = call.part.end - call.part.begin;
  if (num_tokens == 0) return nullptr;
  const RouterShape shape = RouterShapeOf(p.router, num_tokens, p.hidden_size, p.num_experts);
  const char* const x = static_cast<const char*>(p.x) + call.part.begin * p.hidden_size * ElementBytes(p.dtype);
  const auto route = [&](auto element) { return RouteTokens<decltype(element)>(shape, x, call.router, stream); };
  if (Error error = WithElement(p.dtype, route)) return error;
  if (gpu == nullptr) return nullptr;
  return GiveRound(gpu->group(), RowsFrom(p, gpu->group(), *layer, call.part.begin), call.round, stream);
}

int64_t CombineExpertsWorkspaceBytes(const CombineExpertsParams& p) {
  ExpertGpu* gpu = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (CheckCombine(p, &gpu, &layer) != nullptr) return 0;
  Parts parts(nullptr);
  RoundArrays(int64_t{gpu->group().capacity} * p.top_k, NumPlaces(gpu), &parts);
  return parts.num_bytes();
}

Error CombineExperts(const CombineExpertsParams& p, void* workspace, Stream stream) {
  ExpertGpu* gpu = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (const Error error = CheckCombine(p, &gpu, &layer)) return error;
  const ExpertGroup& group = gpu->group();
  Parts parts(workspace);
  const RoundArrays arrays(int64_t{group.capacity} * p.top_k, NumPlaces(gpu), &parts);
  const Part part = PartOf(p);
  for (int32_t begin = part.begin; begin < part.end;) {
    // The first round was given by dispatch_experts.
    const RoundRows rows = RowsFrom(p, group, *layer, begin);
    if (begin > part.begin)
      if (Error error = GiveRound(group, rows, arrays, stream)) return error;
    if (Error error = AwaitExperts(group, stream)) return error;
    const auto add = [&](auto element) {
      return AddRound<decltype(element)>(p, group, layer->num_experts, begin, rows.num_rows, stream);
    };
    if (Error error = WithElement(p.dtype, add)) return error;
    begin += rows.num_rows;
  }
  if (p.num_parts == 1) return nullptr;
  const LaunchShape all{
      dim3(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(DivideUp(p.hidden_size, kThreads))),
      dim3(kThreads)};
  return Launch<FillKernel>(all, stream, p.hidden_size, part.begin, part.end, p.y_dtype, DevicePtr<uint8_t>(p.y));
}

}  // namespace fdsd::cuda
