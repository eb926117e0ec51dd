#include "fdsd/sampling.h"
#include "ops.h"
#include "ruled_logits.h"

namespace fdsd::cuda {
namespace {

// The request that a row of logits belongs to.
__device__ int32_t RequestOf(const RuleArrays& a, int32_t row) {
  int32_t low = 0;
  int32_t high = a.num_requests;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (a.cu_num_logits[middle] > row ? high : low) = middle;
  }
  return low;
}

// Block (i, part): kRuleThreads neighbouring tokens of the i-th row that is wanted.
__global__ __launch_bounds__(kRuleThreads) void ProcessLogitsKernel(RuleArrays a, DevicePtr<const float> logits,
                                                                    DevicePtr<const int32_t> rows, DevicePtr<float> y) {
  const int32_t token = static_cast<int32_t>(blockIdx.y * kRuleThreads + threadIdx.x);
  if (token >= a.vocab_size) return;
  const int32_t index = rows[blockIdx.x];
  const RuledRow row(a, index, RequestOf(a, index));
  const float logit = logits[static_cast<int64_t>(index) * a.vocab_size + token];
  y[static_cast<int64_t>(blockIdx.x) * a.vocab_size + token] = row.Penalised(a, token, logit);
}

// Block (i): the lists of the i-th row that is wanted.
__global__ __launch_bounds__(kRuleThreads) void ProcessListsKernel(RuleArrays a, DevicePtr<const int32_t> rows,
                                                                   DevicePtr<float> y) {
  const int32_t index = rows[blockIdx.x];
  const RuledRow row(a, index, RequestOf(a, index));
  BiasAndMask(a, row, 0, a.vocab_size, y + static_cast<int64_t>(blockIdx.x) * a.vocab_size);
}

}  // namespace

Error ProcessLogits(const ProcessLogitsParams& p, Stream stream) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (p.num_processed < 0) return "num_processed: expected no negative number";
  const RuleArrays arrays = RuleArraysOf(p.rules, p.drafted, p.num_requests, p.vocab_size);
  const auto rows = DevicePtr<const int32_t>(p.rows);
  const auto y = DevicePtr<float>(p.y);
  const auto num_rows = static_cast<unsigned>(p.num_processed);
  const auto num_parts = static_cast<unsigned>(DivideUp(p.vocab_size, kRuleThreads));
  if (Error error = Launch<ProcessLogitsKernel>(LaunchShape{dim3(num_rows, num_parts), dim3(kRuleThreads)}, stream,
                                                arrays, DevicePtr<const float>(p.logits), rows, y))
    return error;
  return Launch<ProcessListsKernel>(LaunchShape{dim3(num_rows), dim3(kRuleThreads)}, stream, arrays, rows, y);
}

}  // namespace fdsd::cuda
