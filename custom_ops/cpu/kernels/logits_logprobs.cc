#include "fdsd/sampling.h"
#include "logits_top.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// The maximum is taken off first: their sum with the logarithm would lose it to a maximum of large magnitude.
float Logprob(float logit, float max, double log_total) {
  return static_cast<float>(static_cast<double>(logit) - max - log_total);
}

// Tokens that come before the chosen one in the order.
int32_t CountBefore(const LogitsRow& row, int32_t chosen) {
  const float logit = row.logits()[chosen];
  row.ForChunks([&](int begin, int end, Chunk* chunk) {
    const float* logits = row.logits();
    const int border = std::clamp(static_cast<int>(chosen), begin, end);
    int32_t count = 0;
    for (int id = begin; id < border; ++id) count += logits[id] >= logit;
    for (int id = border; id < end; ++id) count += logits[id] > logit;
    chunk->count = count;
  });
  return row.Whole().count;
}

// The num_top first tokens in the order; those without a probability follow the others by id.
void WriteTop(const TokenLogprobsParams& p, const LogitsRow& row, int64_t index, double log_total) {
  if (p.num_top == 0) return;
  Candidate* tokens = ScratchArray<Candidate>(Scratch::kInnerTask, p.num_top);
  int count = CollectSorted(row, KeepFirst(row, Kept{kLowest, kAllTied}, p.num_top), tokens);
  for (int32_t id = 0; count < p.num_top; ++id)
    if (row.logits()[id] == -kInf) tokens[count++] = Candidate{-kInf, id, 0.0f};
  for (int i = 0; i < p.num_top; ++i) {
    p.top_token_ids[index * p.num_top + i] = tokens[i].id;
    p.top_logprobs[index * p.num_top + i] = Logprob(tokens[i].logit, row.max(), log_total);
  }
}

// A row without a distribution: NaN everywhere, and ids and ranks that are at least in range.
void WriteInvalid(const TokenLogprobsParams& p, int64_t row) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  p.logprobs[row] = kNan;
  p.ranks[row] = 1;
  for (int i = 0; i < p.num_top; ++i) {
    p.top_token_ids[row * p.num_top + i] = i;
    p.top_logprobs[row * p.num_top + i] = kNan;
  }
}

void WriteRow(const TokenLogprobsParams& p, int64_t index) {
  const LogitsRow row(p.logits + static_cast<int64_t>(p.rows[index]) * p.vocab_size, p.vocab_size);
  if (row.argmax() < 0) return WriteInvalid(p, index);
  const int32_t id = p.token_ids[index];
  const Kept with_weight{LightestLogit(row.max(), 1.0f), kAllTied};
  const double log_total = std::log(WeighRow(row, WeightingOf(row.max(), 1.0f), with_weight));
  p.logprobs[index] = Logprob(row.logits()[id], row.max(), log_total);
  p.ranks[index] = 1 + CountBefore(row, id);
  WriteTop(p, row, index, log_total);
}

}  // namespace

Error TokenLogprobs(const TokenLogprobsParams& p) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (p.num_top < 0 || p.num_top > p.vocab_size) return "num_top: expected 0..vocab_size, got a number outside";
  for (int32_t i = 0; i < p.num_rows; ++i)
    if (p.rows[i] < 0 || p.rows[i] >= p.num_logits) return "rows: expected rows of logits, got one outside";
  for (int32_t i = 0; i < p.num_rows; ++i)
    if (p.token_ids[i] < 0 || p.token_ids[i] >= p.vocab_size)
      return "token_ids: expected ids of the vocabulary, got one outside";
  ForEach(p.num_rows, [&](int64_t row) { WriteRow(p, row); });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
