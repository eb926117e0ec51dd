#include "fdsd/sampling.h"
#include "logits_row.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Tokens of [begin, end) that come before the chosen one in the order.
int32_t CountBefore(const float* logits, int begin, int end, int32_t chosen) {
  const float logit = logits[chosen];
  const int border = std::clamp(static_cast<int>(chosen), begin, end);
  int32_t count = 0;
  for (int id = begin; id < border; ++id) count += logits[id] >= logit;
  for (int id = border; id < end; ++id) count += logits[id] > logit;
  return count;
}

// The maximum is taken off first: their sum with the logarithm would lose it to a maximum of large magnitude.
float Logprob(float logit, const Chunk& whole) {
  return static_cast<float>(static_cast<double>(logit) - whole.max - std::log(whole.weight));
}

// The num_top first tokens in the order. Only tokens that reach the floor of the top can be among them.
void WriteTop(const TokenLogprobsParams& p, const LogitsScan& scan, int64_t row, const Chunk& whole) {
  if (p.num_top == 0) return;
  Candidate* candidates = ScratchArray<Candidate>(Scratch::kTask, 2 * static_cast<int64_t>(p.vocab_size));
  float* scratch = reinterpret_cast<float*>(candidates + p.vocab_size);
  const float floor = FloorOfTop(scan.group_max(row), scan.num_groups(), p.num_top, scratch);
  const int count = Collect(scan, row, floor, candidates);
  if (count > p.num_top) std::nth_element(candidates, candidates + (p.num_top - 1), candidates + count, IsBefore());
  std::sort(candidates, candidates + p.num_top, IsBefore());
  for (int i = 0; i < p.num_top; ++i) {
    p.top_token_ids[row * p.num_top + i] = candidates[i].id;
    p.top_logprobs[row * p.num_top + i] = Logprob(candidates[i].logit, whole);
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

}  // namespace

Error TokenLogprobs(const TokenLogprobsParams& p) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (p.num_top < 0 || p.num_top > p.vocab_size) return "num_top: expected 0..vocab_size, got a number outside";
  for (int32_t i = 0; i < p.num_rows; ++i)
    if (p.token_ids[i] < 0 || p.token_ids[i] >= p.vocab_size)
      return "token_ids: expected ids of the vocabulary, got one outside";
  if (p.num_rows <= 0) return nullptr;
  const LogitsScan scan(p.logits, p.num_rows, p.vocab_size);
  float* max = ScratchArray<float>(Scratch::kRows, p.num_rows);
  for (int64_t row = 0; row < p.num_rows; ++row) max[row] = scan.Whole(row).max;
  scan.ForChunks([&](int64_t row, int begin, int end, Chunk* chunk) {
    const float* logits = scan.row(row);
    chunk->num_before = CountBefore(logits, begin, end, p.token_ids[row]);
    chunk->weight = SumWeights(logits + begin, end - begin, Weighting{max[row], 1.0f, -kInf});
  });
  ParallelFor(p.num_rows, [&](int64_t row) {
    const Chunk whole = scan.Whole(row);
    if (!whole.is_valid || whole.max == -kInf) return WriteInvalid(p, row);
    p.logprobs[row] = Logprob(scan.row(row)[p.token_ids[row]], whole);
    p.ranks[row] = 1 + whole.num_before;
    WriteTop(p, scan, row, whole);
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
