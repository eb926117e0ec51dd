// Mixture of experts: route every token, then multiply the pairs of all experts in one launch, each expert's weights
// with all of its tokens. A token's sum grows in the order of expert ids, slice by slice, whatever other tokens the
// call has.
#include <algorithm>
#include <limits>

#include "fdsd/moe.h"
#include "moe_check.h"
#include "moe_parts.h"

namespace fdsd::cuda {
namespace {

// Tokens that go through the experts together: memory is needed for so many.
constexpr int32_t kWaveTokens = 2048;
constexpr SliceRule kWhole = PairProducts::kWhole;

struct MoeCall {
  MoeFfnParams p;  // of one wave
  int32_t num_pairs;
  Parts parts;
  RouterArrays router;
  PairProducts products;

  // All is as large as the wave needs; workspace nullptr: only to ask how large that is.
  MoeCall(const MoeFfnParams& wave, void* workspace)
      : p(wave),
        num_pairs(wave.num_tokens * wave.router.top_k),
        parts(workspace),
        router(RouterArraysOf(p.router, p.num_tokens, p.num_experts, &parts)),
        products({p.hidden_size, p.intermediate_size, p.dtype, p.experts.gate_up_format, p.experts.down_format,
                  p.experts.gate_limit},
                 num_pairs, &parts) {
    router.experts = parts.Array<int32_t>(num_pairs);
    router.pair_weights = parts.Array<float>(num_pairs);
    router.rows = parts.Array<int32_t>(num_pairs);
    router.tokens = parts.Array<int32_t>(num_pairs);
    router.first = parts.Array<int32_t>(p.num_local_experts + 1);
    router.first_tile = parts.Array<int32_t>(p.num_local_experts + 1);
  }

  RouterShape Shape() const {
    RouterShape shape = RouterShapeOf(p.router, p.num_tokens, p.hidden_size, p.num_experts);
    shape.first_expert = p.first_expert;
    shape.num_local_experts = p.num_local_experts;
    return shape;
  }

  template <typename T>
  Error Run(Stream stream) const {
    const int32_t tile_rows = products.TileRows(p.num_experts);
    if (Error error = RouteTokens<T>(Shape(), p.x, router, stream)) return error;
    if (Error error = NumberPairs(Shape(), router, stream)) return error;
    if (Error error = NumberTiles(p.num_local_experts, tile_rows, router, stream)) return error;
    const RowGroups groups{p.num_local_experts, num_pairs, tile_rows, router.first, router.first_tile, nullptr};
    const ExpertWeights weights{p.experts.gate_up, p.experts.down, p.experts.gate_up_bias, p.experts.down_bias};
    if (p.num_local_experts > 0)
      if (Error error = products.Run(groups, router.tokens, weights, p.x, stream)) return error;
    const CombinePlace place{p.num_slices, p.y_dtype, products.results, p.experts.down_bias, p.shared, p.y};
    return CombineTokens<T>(Shape(), router, place, stream);
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
