#pragma once
// What of a mixture of experts is the same wherever they are: the products of pairs of a row and an expert, and a
// token's sum over its experts, which grows in the order of their ids, slice by slice.
#include <algorithm>

#include "fdsd/experts.h"
#include "linear_input.h"
#include "moe_router.h"
#include "ops.h"
#include "swiglu_rows.h"

namespace fdsd::cuda {

// Parts of the workspace, one after another.
class Parts {
 public:
  explicit Parts(void* memory) : memory_(static_cast<char*>(memory)) {}

  void* Take(int64_t num_bytes) {
    constexpr int64_t kAlignment = 128;
    char* part = memory_ == nullptr ? nullptr : memory_ + num_bytes_;
    num_bytes_ += DivideUp(num_bytes, kAlignment) * kAlignment;
    return part;
  }
  template <typename T>
  DevicePtr<T> Array(int64_t count) {
    return DevicePtr<T>(Take(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  char* memory_;
  int64_t num_bytes_ = 0;
};

// Experts' networks over pairs, those of one expert with its weights at once.
struct PairProducts {
  // Within an expert no sum is cut.
  static constexpr SliceRule kWhole = {1, 1};

  ExpertShape shape;
  int32_t num_pairs;
  void* gate_up;
  void* activated;
  void* results;  // [num_pairs, H] float32, before down_bias
  void* linear;

  PairProducts(const ExpertShape& shape, int32_t num_pairs, Parts* parts) : shape(shape), num_pairs(num_pairs) {
    const int64_t inner = static_cast<int64_t>(num_pairs) * shape.intermediate_size;
    gate_up = parts->Take(2 * inner * ElementBytes(shape.dtype));
    activated = parts->Take(inner * ElementBytes(shape.dtype));
    results = parts->Take(static_cast<int64_t>(num_pairs) * shape.hidden_size * 4);
    linear = parts->Take(std::max(LinearWorkspaceBytes(GateUp({}, nullptr)), LinearWorkspaceBytes(Down({}))));
  }

  // By which tiles of rows are counted where so many experts share the pairs.
  int32_t TileRows(int32_t num_experts) const {
    const int64_t rows = DivideUp(num_pairs, num_experts);
    return std::min(TileRowsOf(shape.gate_up_format, rows), TileRowsOf(shape.down_format, rows));
  }

  // `weights`: of the first expert, the others' follow it; `sources`: the row of x of each pair. What gate_up leaves is
  // rounded to x's type, and so is swiglu's result, as in a dense layer.
  Error Run(RowGroups groups, DevicePtr<const int32_t> sources, const ExpertWeights& weights, const void* x,
            Stream stream) const {
    groups.sources = sources;
    if (Error error = MultiplyGroups(GateUp(weights, x), groups, linear, stream)) return error;
    groups.sources = nullptr;
    const SwigluParams swiglu{num_pairs, shape.intermediate_size, shape.dtype, gate_up, activated};
    const ExpertRows rows{groups.first, groups.count, DevicePtr<const float>(weights.gate_up_bias), shape.gate_limit};
    if (Error error = SwigluExpertRows(swiglu, rows, stream)) return error;
    return MultiplyGroups(Down(weights), groups, linear, stream);
  }

 private:
  LinearParams GateUp(const ExpertWeights& weights, const void* x) const {
    return {num_pairs,
            shape.hidden_size,
            2 * shape.intermediate_size,
            shape.gate_up_format,
            kWhole,
            shape.dtype,
            shape.dtype,
            x,
            weights.gate_up,
            nullptr,
            gate_up};
  }
  LinearParams Down(const ExpertWeights& weights) const {
    return {num_pairs,   shape.intermediate_size, shape.hidden_size, shape.down_format, kWhole,
            shape.dtype, DType::kFloat32,         activated,         weights.down,      nullptr,
            results};
  }
};

struct CombineArrays {
  int32_t num_slices;
  int32_t borders[kMaxSlices + 1];  // experts at which slices begin
  DType y_dtype;
  DevicePtr<const float> results;  // [rows, H]
  DevicePtr<const float> bias;     // [L, H], may be nullptr
  DevicePtr<uint8_t> y;
};

constexpr int kCombineThreads = 256;

// Block (token, part): kCombineThreads neighbouring elements.
template <typename T>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(RouterShape shape, RouterArrays a, CombineArrays c,
                                                                 DevicePtr<const T> shared) {
  const int32_t i = static_cast<int32_t>(blockIdx.y * kCombineThreads + threadIdx.x);
  if (i >= shape.hidden_size) return;
  const int64_t token = blockIdx.x;
  float sums[kMaxSlices] = {};
  for (int32_t k = 0; k < shape.top_k; ++k) {
    const int64_t pair = token * shape.top_k + k;
    const int32_t expert = a.experts[pair];
    const float weight = a.pair_weights[pair];
    const int32_t local = expert - shape.first_expert;
    if (local < 0 || local >= shape.num_local_experts) continue;
    float result = c.results[static_cast<int64_t>(a.rows[pair]) * shape.hidden_size + i];
    if (c.bias != nullptr) result = result + c.bias[static_cast<int64_t>(local) * shape.hidden_size + i];
#pragma unroll
    for (int s = 0; s < kMaxSlices; ++s) {
      if (s >= c.num_slices || expert < c.borders[s] || expert >= c.borders[s + 1]) continue;
      sums[s] = fmaf(weight, result, sums[s]);
    }
  }
  const int64_t place = token * shape.hidden_size + i;
  SliceTree total{};
#pragma unroll
  for (int s = 0; s < kMaxSlices; ++s) total.Add(s, sums[s]);
  float sum = total.Total(c.num_slices);
  if (shared != nullptr) sum = sum + LoadFloat<T>(shared, place);
  StoreFloat(c.y_dtype, c.y, place, sum);
}

// What a call says of its sums and where they go.
struct CombinePlace {
  int32_t num_slices;
  DType y_dtype;
  const void* results;
  const float* bias;
  const void* shared;  // [T, H] of x's type, may be nullptr
  void* y;
};

template <typename T>
Error CombineTokens(const RouterShape& shape, const RouterArrays& router, const CombinePlace& p, Stream stream) {
  CombineArrays arrays{
      p.num_slices,           {}, p.y_dtype, DevicePtr<const float>(p.results), DevicePtr<const float>(p.bias),
      DevicePtr<uint8_t>(p.y)};
  for (int32_t s = 0; s <= p.num_slices; ++s)
    arrays.borders[s] =
        shape.first_expert + static_cast<int32_t>(HalvingBorder(shape.num_local_experts, p.num_slices, 1, s));
  const auto num_parts = static_cast<unsigned>(DivideUp(shape.hidden_size, kCombineThreads));
  const LaunchShape launch{dim3(static_cast<unsigned>(shape.num_tokens), num_parts), dim3(kCombineThreads)};
  return Launch<CombineKernel<T>>(launch, stream, shape, router, arrays, DevicePtr<const T>(p.shared));
}

inline RouterShape RouterShapeOf(const MoeFfnParams::Router& r, int32_t num_tokens, int32_t hidden_size,
                                 int32_t num_experts) {
  return {num_tokens,  hidden_size, num_experts, 0,         num_experts,  r.top_k,
          r.normalize, r.norm_min,  r.scale,     r.sigmoid, r.num_groups, r.num_chosen_groups};
}

// The router's weights, and what choosing takes of the workspace; where the experts go is left open.
inline RouterArrays RouterArraysOf(const MoeFfnParams::Router& r, int64_t num_tokens, int64_t num_experts,
                                   Parts* parts) {
  RouterArrays router{};
  router.weight = DevicePtr<const float>(r.router_weight);
  router.bias = DevicePtr<const float>(r.router_bias);
  router.selection_bias = DevicePtr<const float>(r.selection_bias);
  router.probs = parts->Array<float>(num_tokens * num_experts);
  router.ranks = parts->Array<uint32_t>(num_tokens * num_experts);
  router.chosen = parts->Array<int32_t>(num_tokens * r.top_k);
  return router;
}

template <typename T>
Error RouteTokens(const RouterShape& shape, const void* x, const RouterArrays& router, Stream stream) {
  const LaunchShape tokens{dim3(static_cast<unsigned>(shape.num_tokens)), dim3(kRouterThreads)};
  return Launch<RouteKernel<T>>(tokens, stream, shape, DevicePtr<const T>(x), router);
}

// Number the pairs of the experts that are here, in their order.
inline Error NumberPairs(const RouterShape& shape, const RouterArrays& router, Stream stream) {
  const LaunchShape experts{dim3(static_cast<unsigned>(shape.num_local_experts)), dim3(kRouterThreads)};
  return Launch<NumberPairsKernel>(experts, stream, shape, router);
}

// Number the tiles of the experts that are here.
inline Error NumberTiles(int32_t num_experts, int32_t tile_rows, const RouterArrays& router, Stream stream) {
  const LaunchShape one{dim3(1), dim3(kRouterThreads)};
  return Launch<NumberTilesKernel>(one, stream, num_experts, tile_rows, router);
}

}  // namespace fdsd::cuda
