// Mixture of experts: route every token, then run the used experts side by side. A token's sum grows in the order of
// expert ids, slice by slice, whatever other tokens the call has.
#include "fdsd/moe.h"

#include "expert_sums.h"
#include "expert_wave.h"
#include "moe_check.h"
#include "moe_router.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr SliceRule kWhole = {1, 1};

ExpertShape ShapeOf(const MoeFfnParams& p) {
  return {p.hidden_size,         p.intermediate_size, p.dtype, p.experts.gate_up_format,
          p.experts.down_format, p.experts.gate_limit};
}

RouterInput RouterInputOf(const MoeFfnParams& p) {
  return {p.num_tokens, p.hidden_size, p.num_experts, p.dtype, p.router, p.x};
}

struct Buffers {
  MoePairs pairs;
  ExpertWeights* experts;   // [L]
  float* sums;              // [slices, T, H]
  RunExpertsParams of_run;  // the local experts'
  ExpertBuffers run;
  char* router;

  Buffers(const MoeFfnParams& p, Arena* arena)
      : pairs(RouterInputOf(p), arena),
        experts(arena->Take<ExpertWeights>(p.num_local_experts)),
        sums(arena->Take<float>(int64_t{p.num_slices} * p.num_tokens * p.hidden_size)),
        of_run(Run(p)),
        // An expert has at most one pair per token.
        run(of_run, p.num_tokens, int64_t{p.num_tokens} * p.router.top_k, arena),
        router(arena->Take<char>(RouterBytes(RouterInputOf(p)))) {}

  RunExpertsParams Run(const MoeFfnParams& p) const {
    const int64_t rows_per_expert = int64_t{p.num_tokens} * p.router.top_k / p.num_experts;
    RunExpertsParams run{};
    run.shape = ShapeOf(p);
    run.num_experts = p.num_local_experts;
    run.rows_per_expert = static_cast<int32_t>(rows_per_expert);
    run.experts = experts;
    run.first_pair = pairs.first + p.first_expert;
    run.x_rows = pairs.tokens;
    run.x_stride = p.hidden_size;
    run.x = p.x;
    return run;
  }

  // Of the experts that have pairs.
  void PlaceExperts(const MoeFfnParams& p) const {
    const int64_t inner = p.intermediate_size;
    const int64_t gate_up_bytes =
        PackedLinearBytes(p.hidden_size, static_cast<int32_t>(2 * inner), p.experts.gate_up_format, kWhole);
    const int64_t down_bytes = PackedLinearBytes(p.intermediate_size, p.hidden_size, p.experts.down_format, kWhole);
    const auto bias = [](const float* all, int64_t offset) { return all == nullptr ? nullptr : all + offset; };
    for (int64_t e = 0; e < p.num_local_experts; ++e) {
      if (of_run.first_pair[e] == of_run.first_pair[e + 1]) continue;
      experts[e] = {static_cast<const char*>(p.experts.gate_up) + e * gate_up_bytes,
                    static_cast<const char*>(p.experts.down) + e * down_bytes,
                    bias(p.experts.gate_up_bias, e * 2 * inner), bias(p.experts.down_bias, e * p.hidden_size)};
    }
  }
};

// Add the token's pairs in this wave to its sums, in order of the experts.
void AddToken(const MoeFfnParams& p, const Buffers& b, const ExpertWave& wave, int64_t token) {
  const auto border = [&](int32_t slice) {
    return b.pairs.first[p.first_expert + HalvingBorder(p.num_local_experts, p.num_slices, 1, slice)];
  };
  for (int32_t k = 0; k < p.router.top_k; ++k) {
    const int64_t pair = b.pairs.token_pairs[token * p.router.top_k + k];
    if (pair < wave.first_pair() || pair >= wave.end_pair()) continue;
    const int64_t slice = SliceOf(pair, p.num_slices, border);
    AddExpert(b.pairs.weights[pair], b.run.y + (pair - wave.first_pair()) * p.hidden_size, p.hidden_size,
              b.sums + (slice * p.num_tokens + token) * p.hidden_size);
  }
}

void StoreTokens(const MoeFfnParams& p, const Buffers& b) {
  const int64_t size = p.hidden_size;
  WithTypes(p.dtype, p.y_dtype, [&](auto t, auto y) {
    ParallelFor(p.num_tokens, [&](int64_t token) {
      const auto* shared = static_cast<const decltype(t)*>(p.shared);
      StoreExperts(b.sums + token * size, p.num_slices, p.num_tokens * size,
                   shared == nullptr ? nullptr : shared + token * size, p.hidden_size,
                   static_cast<decltype(y)*>(p.y) + token * size);
    });
  });
}

Error CheckMoe(const MoeFfnParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (const Error error = CheckExperts(ShapeOf(p))) return error;
  if (const Error error = CheckRouter(p.router, p.num_experts)) return error;
  if (p.num_slices != 1 && p.num_slices != 2 && p.num_slices != 4) {
    return "num_slices: expected 1, 2 or 4, got another number";
  }
  if (p.num_local_experts < 0 || p.first_expert < 0 || p.num_local_experts > p.num_experts - p.first_expert) {
    return "first_expert: expected experts within the router's num_experts, got others";
  }
  if (static_cast<int64_t>(p.num_tokens) * p.router.top_k > std::numeric_limits<int32_t>::max())
    return "num_tokens: expected at most 2^31 - 1 pairs of a token and an expert, got more";
  const Error error =
      CheckLinear(p.hidden_size, p.intermediate_size, p.experts.gate_up_format, kWhole, p.experts.gate_up);
  if (error != nullptr) return error;
  return CheckLinear(p.intermediate_size, p.hidden_size, p.experts.down_format, kWhole, p.experts.down);
}

}  // namespace

Error MoeFfn(const MoeFfnParams& p) {
  if (const Error error = CheckMoe(p)) return error;
  Arena sizes(nullptr);
  Buffers(p, &sizes);
  Arena arena(ScratchArray<char>(Scratch::kOp, sizes.size()));
  const Buffers b(p, &arena);
  RouteTokens(RouterInputOf(p), b.pairs, b.router);
  b.PlaceExperts(p);
  std::memset(b.sums, 0,
              sizeof(float) * static_cast<size_t>(p.num_slices) * static_cast<size_t>(p.num_tokens) *
                  static_cast<size_t>(p.hidden_size));
  const int32_t end_pair = b.of_run.first_pair[p.num_local_experts];
  for (int32_t expert = 0; b.of_run.first_pair[expert] < end_pair;) {
    const ExpertWave wave(b.of_run, b.run, &expert);
    wave.Run();
    ParallelFor(p.num_tokens, [&](int64_t token) { AddToken(p, b, wave, token); });
  }
  StoreTokens(p, b);
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
