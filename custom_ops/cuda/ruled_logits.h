#pragma once
// What the rules of a request make of its rows of logits: two kernels, one for what is looked up by token, one for the
// lists. See LogitsRules in fdsd/sampling.h.
#include "device.h"
#include "fdsd/sampling.h"
#include "numbers.h"

namespace fdsd::cuda {

constexpr int kRuleThreads = 256;

struct RuleArrays {
  int32_t num_requests;
  int32_t vocab_size;
  int32_t max_num_bias;
  int32_t num_allowed_words;
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const float> repetition_penalty;
  DevicePtr<const float> presence_penalty;
  DevicePtr<const float> frequency_penalty;
  DevicePtr<const int32_t> count_rows;
  DevicePtr<const int32_t> token_counts;
  DevicePtr<const int32_t> num_bias;
  DevicePtr<const int32_t> bias_token_ids;
  DevicePtr<const float> bias_values;
  DevicePtr<const int32_t> cu_mask;
  DevicePtr<const int32_t> mask_token_ids;
  DevicePtr<const int32_t> allowed_rows;
  DevicePtr<const int32_t> allowed_bits;
  DevicePtr<const int32_t> cu_num_logits;  // nullptr = no row follows a draft
  DevicePtr<const int32_t> draft_token_ids;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const int32_t> parent_rows;  // nullptr = each row follows the row before

  // The row that one follows, both counted from the request's `first`.
  __device__ __forceinline__ int32_t ParentOf(int64_t row, int32_t first) const {
    return parent_rows == nullptr ? static_cast<int32_t>(row) - first - 1 : static_cast<int32_t>(parent_rows[row]);
  }
};

inline RuleArrays RuleArraysOf(const LogitsRules& rules, const DraftedRows& drafted, int32_t num_requests,
                               int32_t vocab_size) {
  return RuleArrays{num_requests,
                    vocab_size,
                    rules.max_num_bias,
                    rules.allowed.num_allowed_words,
                    DevicePtr<const int32_t>(rules.table_rows),
                    DevicePtr<const float>(rules.repetition_penalty),
                    DevicePtr<const float>(rules.presence_penalty),
                    DevicePtr<const float>(rules.frequency_penalty),
                    DevicePtr<const int32_t>(rules.count_rows),
                    DevicePtr<const int32_t>(rules.token_counts),
                    DevicePtr<const int32_t>(rules.num_bias),
                    DevicePtr<const int32_t>(rules.bias_token_ids),
                    DevicePtr<const float>(rules.bias_values),
                    DevicePtr<const int32_t>(rules.cu_mask),
                    DevicePtr<const int32_t>(rules.mask_token_ids),
                    DevicePtr<const int32_t>(rules.allowed.allowed_rows),
                    DevicePtr<const int32_t>(rules.allowed.allowed_bits),
                    DevicePtr<const int32_t>(drafted.cu_num_logits),
                    DevicePtr<const int32_t>(drafted.draft_token_ids),
                    DevicePtr<const int32_t>(drafted.cu_num_draft),
                    DevicePtr<const int32_t>(drafted.parent_rows)};
}

// A row of logits: whose it is, and the drafts on its path.
struct RuledRow {
  int64_t index;
  int32_t table_row;
  int32_t first_draft;
  int32_t first_row;  // of the request

  __device__ __forceinline__ RuledRow(const RuleArrays& a, int64_t row, int32_t request)
      : index(row), table_row(a.table_rows[request]), first_draft(0), first_row(static_cast<int32_t>(row)) {
    if (a.cu_num_logits == nullptr) return;
    first_draft = a.cu_num_draft[request];
    first_row = a.cu_num_logits[request];
  }

  __device__ __forceinline__ bool HasLists(const RuleArrays& a) const {
    return a.num_bias[table_row] > 0 || a.cu_mask[index] < a.cu_mask[index + 1];
  }

  // The token's logit where its grammar allows it, with the penalties for the tokens before.
  __device__ float Penalised(const RuleArrays& a, int32_t token, float logit) const {
    constexpr int32_t kInPrompt = 1 << 30;
    const int64_t allowed_row = a.allowed_rows[index];
    if (allowed_row >= 0) {
      const int32_t word = a.allowed_bits[allowed_row * a.num_allowed_words + token / 32];
      if ((word >> (token % 32) & 1) == 0) return -INFINITY;
    }
    const int64_t count_row = a.count_rows[table_row];
    if (count_row < 0) return logit;
    const int32_t seen = a.token_counts[count_row * a.vocab_size + token];
    int32_t count = seen & (kInPrompt - 1);
    for (int32_t j = static_cast<int32_t>(index) - first_row; j > 0; j = a.ParentOf(first_row + j, first_row))
      count += a.draft_token_ids[first_draft + j - 1] == token ? 1 : 0;
    const float repetition = a.repetition_penalty[table_row];
    if (count > 0 || (seen & kInPrompt) != 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
    if (count > 0)
      logit = logit - a.frequency_penalty[table_row] * static_cast<float>(count) - a.presence_penalty[table_row];
    return logit;
  }
};

// Whether the list has item i before it.
__device__ __forceinline__ bool IsRepeated(DevicePtr<const int32_t> list, int32_t i) {
  for (int32_t before = 0; before < i; ++before)
    if (list[before] == list[i]) return true;
  return false;
}

// The block's threads: the biases of a row, then its forbidden tokens, for tokens [begin, end), whose logits are at y.
// A token that comes twice in a list is the work of the thread that has the first, in the list's order.
__device__ inline void BiasAndMask(const RuleArrays& a, const RuledRow& row, int32_t begin, int32_t end,
                                   DevicePtr<float> y) {
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  const int64_t first_bias = static_cast<int64_t>(row.table_row) * a.max_num_bias;
  const int32_t num_bias = a.num_bias[row.table_row];
  const DevicePtr<const int32_t> biased = a.bias_token_ids + first_bias;
  for (int32_t i = threadIdx.x; i < num_bias; i += num_threads) {
    const int32_t token = biased[i];
    if (token < begin || token >= end || IsRepeated(biased, i)) continue;
    float logit = y[token - begin];
    for (int32_t j = i; j < num_bias; ++j)
      if (biased[j] == token) logit += a.bias_values[first_bias + j];
    y[token - begin] = logit;
  }
  __syncthreads();
  const int32_t first_mask = a.cu_mask[row.index];
  const DevicePtr<const int32_t> masked = a.mask_token_ids + first_mask;
  for (int32_t i = threadIdx.x; i < a.cu_mask[row.index + 1] - first_mask; i += num_threads) {
    const int32_t token = masked[i];
    if (token >= begin && token < end && !IsRepeated(masked, i)) y[token - begin] = -INFINITY;
  }
}

}  // namespace fdsd::cuda
