// Mixture of experts: route every token, then multiply the pairs of all experts in one launch, each expert's weights
// with all of its tokens. A token's sum grows in the order of expert ids, slice by slice, whatever other tokens the
// call has.
#include <algorithm>
#include <limits>

#include "fdsd/moe.h"
#include "linear_input.h"
#include "moe_check.h"
#include "moe_router.h"
#include "ops.h"
#include "swiglu_rows.h"

namespace fdsd::cuda {
namespace {

// Tokens that go through the experts together: memory is needed for so many.
constexpr int32_t kWaveTokens = 2048;
constexpr int kThreads = 256;
// Within an expert no sum is cut.
constexpr SliceRule kWhole = {1, 1};

struct CombineArrays {
  int32_t num_slices;
  int32_t borders[kMaxSlices + 1];  // experts at which slices begin
  DType y_dtype;
  DevicePtr<const float> results;  // [rows, H]
  DevicePtr<const float> bias;     // [L, H], may be nullptr
  DevicePtr<uint8_t> y;
};

// Block (token, part): kThreads neighbouring elements.
template <typename T>
__global__ __launch_bounds__(kThreads) void CombineKernel(RouterShape shape, RouterArrays a, CombineArrays c,
                                                          DevicePtr<const T> shared) {
  const int32_t i = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
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

struct MoeCall {
  MoeFfnParams p;  // of one wave
  int32_t num_pairs;
  Parts parts;
  RouterArrays router;
  void* gate_up;
  void* activated;
  void* results;
  void* linear;

  // All is as large as the wave needs; workspace nullptr: only to ask how large that is.
  MoeCall(const MoeFfnParams& wave, void* workspace)
      : p(wave), num_pairs(wave.num_tokens * wave.router.top_k), parts(workspace), router() {
    const int64_t scores = static_cast<int64_t>(p.num_tokens) * p.num_experts;
    router.weight = DevicePtr<const float>(p.router.router_weight);
    router.bias = DevicePtr<const float>(p.router.router_bias);
    router.selection_bias = DevicePtr<const float>(p.router.selection_bias);
    router.probs = parts.Array<float>(scores);
    router.ranks = parts.Array<uint32_t>(scores);
    router.chosen = parts.Array<int32_t>(num_pairs);
    router.experts = parts.Array<int32_t>(num_pairs);
    router.pair_weights = parts.Array<float>(num_pairs);
    router.rows = parts.Array<int32_t>(num_pairs);
    router.tokens = parts.Array<int32_t>(num_pairs);
    router.first = parts.Array<int32_t>(p.num_local_experts + 1);
    router.first_tile = parts.Array<int32_t>(p.num_local_experts + 1);
    const int64_t inner = static_cast<int64_t>(num_pairs) * p.intermediate_size;
    gate_up = parts.Take(2 * inner * ElementBytes(p.dtype));
    activated = parts.Take(inner * ElementBytes(p.dtype));
    results = parts.Take(static_cast<int64_t>(num_pairs) * p.hidden_size * 4);
    linear = parts.Take(std::max(LinearWorkspaceBytes(GateUp()), LinearWorkspaceBytes(Down())));
  }

  LinearParams GateUp() const {
    return {num_pairs,
            p.hidden_size,
            2 * p.intermediate_size,
            p.experts.gate_up_format,
            kWhole,
            p.dtype,
            p.dtype,
            p.x,
            p.experts.gate_up,
            nullptr,
            gate_up};
  }
  LinearParams Down() const {
    return {num_pairs, p.intermediate_size, p.hidden_size, p.experts.down_format, kWhole,
            p.dtype,   DType::kFloat32,     activated,     p.experts.down,        nullptr,
            results};
  }
  RouterShape Shape() const {
    return {p.num_tokens,        p.hidden_size,    p.num_experts,       p.first_expert,
            p.num_local_experts, p.router.top_k,   p.router.normalize,  p.router.norm_min,
            p.router.scale,      p.router.sigmoid, p.router.num_groups, p.router.num_chosen_groups};
  }

  template <typename T>
  Error Route(int32_t tile_rows, Stream stream) const {
    const dim3 threads(kRouterThreads);
    const LaunchShape tokens{dim3(static_cast<unsigned>(p.num_tokens)), threads};
    if (Error error = Launch<RouteKernel<T>>(tokens, stream, Shape(), DevicePtr<const T>(p.x), router)) return error;
    const LaunchShape experts{dim3(static_cast<unsigned>(p.num_local_experts)), threads};
    if (Error error = Launch<NumberPairsKernel>(experts, stream, Shape(), router)) return error;
    return Launch<NumberTilesKernel>(LaunchShape{dim3(1), threads}, stream, p.num_local_experts, tile_rows, router);
  }

  // What gate_up leaves is rounded to p.dtype, and so is swiglu's result, as in a dense layer.
  Error RunExperts(RowGroups groups, Stream stream) const {
    groups.sources = router.tokens;
    if (Error error = MultiplyGroups(GateUp(), groups, linear, stream)) return error;
    groups.sources = nullptr;
    const SwigluParams swiglu{num_pairs, p.intermediate_size, p.dtype, gate_up, activated};
    const ExpertRows rows{groups.first, p.num_local_experts, DevicePtr<const float>(p.experts.gate_up_bias),
                          p.experts.gate_limit};
    if (Error error = SwigluExpertRows(swiglu, rows, stream)) return error;
    return MultiplyGroups(Down(), groups, linear, stream);
  }

  template <typename T>
  Error Combine(Stream stream) const {
    CombineArrays arrays{p.num_slices,
                         {},
                         p.y_dtype,
                         DevicePtr<const float>(results),
                         DevicePtr<const float>(p.experts.down_bias),
                         DevicePtr<uint8_t>(p.y)};
    for (int32_t s = 0; s <= p.num_slices; ++s)
      arrays.borders[s] = p.first_expert + static_cast<int32_t>(HalvingBorder(p.num_local_experts, p.num_slices, 1, s));
    const auto num_parts = static_cast<unsigned>(DivideUp(p.hidden_size, kThreads));
    const LaunchShape launch{dim3(static_cast<unsigned>(p.num_tokens), num_parts), dim3(kThreads)};
    return Launch<CombineKernel<T>>(launch, stream, Shape(), router, arrays, DevicePtr<const T>(p.shared));
  }

  template <typename T>
  Error Run(Stream stream) const {
    const int64_t rows = DivideUp(num_pairs, p.num_experts);
    const int32_t tile_rows =
        std::min(TileRowsOf(p.experts.gate_up_format, rows), TileRowsOf(p.experts.down_format, rows));
    if (Error error = Route<T>(tile_rows, stream)) return error;
    const RowGroups groups{p.num_local_experts, num_pairs, tile_rows, router.first, router.first_tile, nullptr};
    if (p.num_local_experts > 0)
      if (Error error = RunExperts(groups, stream)) return error;
    return Combine<T>(stream);
  }
};

Error CheckMoe(const MoeFfnParams& p) {
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max() / kWaveTokens;
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number, got 0 or less";
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (const Error error = CheckRouter(p.router, p.num_experts)) return error;
  if (p.router.top_k > kMaxRows) return "top_k: expected fewer experts per token, got more";
  if (!(p.experts.gate_limit >= 0)) return "gate_limit: expected 0 (none) or a positive number, got another";
  if (p.num_slices != 1 && p.num_slices != 2 && p.num_slices != 4)
    return "num_slices: expected 1, 2 or 4, got another number";
  if (p.num_local_experts < 0 || p.first_expert < 0 || p.num_local_experts > p.num_experts - p.first_expert)
    return "first_expert: expected experts within the router's num_experts, got others";
  const Error error =
      CheckLinear(p.hidden_size, p.intermediate_size, p.experts.gate_up_format, kWhole, p.experts.gate_up);
  if (error != nullptr) return error;
  return CheckLinear(p.intermediate_size, p.hidden_size, p.experts.down_format, kWhole, p.experts.down);
}

// The tokens from `first` on, at most a wave of them.
MoeFfnParams WaveOf(const MoeFfnParams& p, int32_t first) {
  const auto at = [&](const void* rows, DType dtype) -> const void* {
    const int64_t offset = static_cast<int64_t>(first) * p.hidden_size * ElementBytes(dtype);
    return rows == nullptr ? nullptr : static_cast<const char*>(rows) + offset;
  };
  MoeFfnParams wave = p;
  wave.num_tokens = std::min(p.num_tokens - first, kWaveTokens);
  wave.x = at(p.x, p.dtype);
  wave.shared = at(p.shared, p.dtype);
  wave.y = const_cast<void*>(at(p.y, p.y_dtype));
  return wave;
}

}  // namespace

int64_t MoeFfnWorkspaceBytes(const MoeFfnParams& p) {
  return CheckMoe(p) == nullptr ? MoeCall(WaveOf(p, 0), nullptr).parts.num_bytes() : 0;
}

Error MoeFfn(const MoeFfnParams& p, void* workspace, Stream stream) {
  if (const Error error = CheckMoe(p)) return error;
  for (int32_t first = 0; first < p.num_tokens; first += kWaveTokens) {
    const MoeCall call(WaveOf(p, first), workspace);
    const auto run = [&](auto element) { return call.Run<decltype(element)>(stream); };
    if (Error error = WithElement(p.dtype, run)) return error;
  }
  return nullptr;
}

}  // namespace fdsd::cuda
