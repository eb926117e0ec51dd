// Logarithms of probabilities: a block has a row. Weights are integers, as in sampling.cu, so their sum is exact.
#include "fdsd/sampling.h"
#include "ops.h"
#include "tokens_in_order.h"

namespace fdsd::cuda {
namespace {

struct LogprobArrays {
  int32_t vocab_size;
  int32_t num_top;
  DevicePtr<const float> logits;
  DevicePtr<const int32_t> rows;
  DevicePtr<const int32_t> token_ids;
  DevicePtr<float> logprobs;
  DevicePtr<int32_t> ranks;
  DevicePtr<int32_t> top_token_ids;
  DevicePtr<float> top_logprobs;
  DevicePtr<Amount> lists;  // [N, num_top]
};

// A row without a distribution: NaN everywhere, and ids and ranks that are at least in range.
__device__ void WriteInvalid(const LogprobArrays& a, int64_t index) {
  const float nan = __uint_as_float(0x7fc00000u);
  for (int32_t i = threadIdx.x; i < a.num_top; i += kRowThreads) {
    a.top_token_ids[index * a.num_top + i] = i;
    a.top_logprobs[index * a.num_top + i] = nan;
  }
  if (threadIdx.x != 0) return;
  a.logprobs[index] = nan;
  a.ranks[index] = 1;
}

// Block (token).
__global__ __launch_bounds__(kRowThreads, 2) void TokenLogprobsKernel(LogprobArrays a) {
  const int64_t index = blockIdx.x;
  const LogitsInMemory row{a.logits + static_cast<int64_t>(a.rows[index]) * a.vocab_size, a.vocab_size};
  const Best best = BestOf(row);
  if (best.token < 0) return WriteInvalid(a, index);
  const WeightMeasure measure = WeightingOf(best.max, 1.0f);
  const Amount total = TotalOf(row, Kept{LightestLogit(best.max, 1.0f), kAllTied}, measure);
  const double log_total = log(static_cast<double>(total) / static_cast<double>(WeightMeasure::kOne));
  // The maximum is taken off first: its sum with the logarithm would lose the latter where it is large.
  const auto logprob = [&](int32_t token) {
    const auto logit = static_cast<double>(static_cast<float>(row.logits[token]));
    return static_cast<float>(logit - static_cast<double>(best.max) - log_total);
  };
  const int32_t token = a.token_ids[index];
  const Amount num_before = TotalOf(row, Kept{row.logits[token], token - 1}, CountMeasure());
  if (threadIdx.x == 0) {
    a.logprobs[index] = logprob(token);
    a.ranks[index] = static_cast<int32_t>(num_before) + 1;
  }
  if (a.num_top == 0) return;
  // Tokens without a probability are in the order too, after the others.
  Kept top{-INFINITY, kAllTied};
  KeepPrefix(row, CountMeasure(), static_cast<Amount>(a.num_top), &top);
  ListKept(row, top, a.lists + index * a.num_top, [&](int32_t i, Amount place) {
    const int32_t listed = TokenOf(place);
    a.top_token_ids[index * a.num_top + i] = listed;
    a.top_logprobs[index * a.num_top + i] = logprob(listed);
  });
}

}  // namespace

int64_t TokenLogprobsWorkspaceBytes(const TokenLogprobsParams& p) {
  return static_cast<int64_t>(p.num_rows) * p.num_top * static_cast<int64_t>(sizeof(Amount));
}

Error TokenLogprobs(const TokenLogprobsParams& p, void* workspace, Stream stream) {
  if (p.vocab_size <= 0 || p.vocab_size > kMaxVocabSize) return "vocab_size: expected 1..524288, got another number";
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  if (p.num_top < 0 || p.num_top > p.vocab_size) return "num_top: expected 0..vocab_size, got a number outside";
  const LogprobArrays arrays{p.vocab_size,
                             p.num_top,
                             DevicePtr<const float>(p.logits),
                             DevicePtr<const int32_t>(p.rows),
                             DevicePtr<const int32_t>(p.token_ids),
                             DevicePtr<float>(p.logprobs),
                             DevicePtr<int32_t>(p.ranks),
                             DevicePtr<int32_t>(p.top_token_ids),
                             DevicePtr<float>(p.top_logprobs),
                             DevicePtr<Amount>(workspace)};
  return Launch<TokenLogprobsKernel>(LaunchShape{dim3(static_cast<unsigned>(p.num_rows)), dim3(kRowThreads)}, stream,
                                     arrays);
}

}  // namespace fdsd::cuda
