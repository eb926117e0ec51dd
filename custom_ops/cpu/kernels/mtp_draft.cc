#include <algorithm>
#include <numeric>

#include "fdsd/mtp.h"
#include "logits_weights.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

Error CheckNext(const MtpPostprocessParams& p, int32_t r) {
  if (p.table_rows[r] < 0 || p.table_rows[r] >= p.blocks.num_table_rows)
    return "table_rows: expected rows of block_table, got one outside";
  if (p.num_committed[r] < 0) return "num_committed: expected >= 0, got a negative count";
  const int64_t block = (static_cast<int64_t>(p.num_committed[r]) + p.step) / p.blocks.block_size;
  if (block >= p.blocks.max_blocks ||
      p.blocks.block_table[static_cast<int64_t>(p.table_rows[r]) * p.blocks.max_blocks + block] < 0)
    return "block_table: expected a block for the next slot, got none";
  return nullptr;
}

Error CheckPostprocess(const MtpPostprocessParams& p) {
  if (p.blocks.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (p.step < 0) return "step: expected >= 0, got a negative number";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (!(p.drafts.min_prob >= 0 && p.drafts.min_prob <= 1))
    return "min_prob: expected a probability, got another number";
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_draft[p.num_requests] > p.drafts.num_drafts)
    return "cu_num_draft: expected at most num_drafts last, got more";
  int32_t num_rows = 0;
  int32_t num_next = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.num_wanted[r] > p.cu_num_draft[r + 1] - p.cu_num_draft[r])
      return "num_wanted: expected at most the room for the request's drafts, got more";
    num_rows += p.num_wanted[r] > p.step;
    if (p.num_wanted[r] <= p.step + 1) continue;
    ++num_next;
    if (Error error = CheckNext(p, r)) return error;
  }
  if (num_rows != p.num_rows) return "logits: expected a row for every request that drafts, got another number";
  if (num_next > p.num_next) return "num_next: expected room for requests with more drafts to come, got less";
  return nullptr;
}

bool IsDraft(const Chunk& best) { return best.is_valid && best.max > -kInf; }

int32_t DraftOf(const MtpPostprocessParams& p, const Chunk& best) {
  if (!IsDraft(best)) return -1;
  return p.drafts.token_map == nullptr ? best.argmax : p.drafts.token_map[best.argmax];
}

// The weight of the tokens [begin, end) against that of the most likely one.
double WeightOf(const float* logits, int begin, int end, float max) {
  const Weighting weighting = WeightingOf(max, 1.0F);
  const float floor = LightestLogit(max, 1.0F);
  WeightSum sum;
  for (int i = begin; i < end; i += kGroupTokens)
    sum.Add<Bound::kInclusive>(logits + i, std::min(kGroupTokens, end - i), weighting, floor);
  return sum.Total();
}

// The row of request r in the next pass.
void WriteNext(const MtpPostprocessParams& p, int32_t r, int32_t row, int32_t draft, int32_t b) {
  const int32_t slot = p.num_committed[r] + p.step;
  const int64_t block =
      p.blocks.block_table[static_cast<int64_t>(p.table_rows[r]) * p.blocks.max_blocks + slot / p.blocks.block_size];
  p.out.input_ids[b] = std::max(draft, 0);
  p.out.positions[b] = slot;
  p.out.slot_mapping[b] = block * p.blocks.block_size + slot % p.blocks.block_size;
  std::memcpy(static_cast<char*>(p.out.hidden) + b * p.row_bytes,
              static_cast<const char*>(p.hidden) + row * p.row_bytes, static_cast<size_t>(p.row_bytes));
}

// The probabilities of the drafts of this step, where they are wanted: of the most likely token of a row of logits, one
// over the weight of all against its own. A draft that is too improbable becomes -1.
void WriteProbabilities(const MtpPostprocessParams& p, const LogitsScan& scan) {
  if (std::none_of(p.min_survival, p.min_survival + p.num_requests, [](float least) { return least >= 0; })) return;
  const int num_chunks = CeilDiv(p.vocab_size, kChunkTokens);
  double* weights = ScratchArray<double>(Scratch::kRows, static_cast<int64_t>(p.num_rows) * num_chunks);
  ParallelFor(static_cast<int64_t>(p.num_rows) * num_chunks, [&](int64_t task) {
    const int64_t row = task / num_chunks;
    const int begin = static_cast<int>(task % num_chunks) * kChunkTokens;
    const Chunk best = scan.Whole(row);
    weights[task] = IsDraft(best) ? WeightOf(p.logits + row * p.vocab_size, begin,
                                             std::min(begin + kChunkTokens, p.vocab_size), best.max)
                                  : 0.0;
  });
  int64_t row = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.num_wanted[r] <= p.step) continue;
    const double weight = std::accumulate(weights + row * num_chunks, weights + (row + 1) * num_chunks, 0.0);
    ++row;
    if (p.min_survival[r] < 0) continue;
    const int32_t draft = p.cu_num_draft[r] + p.step;
    const float prob = weight > 0 ? static_cast<float>(1.0 / weight) : 0.0F;
    p.drafts.draft_prob[draft] = prob < p.drafts.min_prob ? 0.0F : prob;
    if (prob < p.drafts.min_prob) p.drafts.draft_token_ids[draft] = -1;
  }
}

// Whether the drafts of request r up to this one are so improbable together that no more are wanted.
bool IsImprobable(const MtpPostprocessParams& p, int32_t r) {
  const float* prob = p.drafts.draft_prob + p.cu_num_draft[r];
  float survival = 1.0F;
  for (int32_t i = 0; i <= p.step; ++i) survival *= prob[i];
  return survival < p.min_survival[r];
}

}  // namespace

Error MtpPostprocess(const MtpPostprocessParams& p) {
  if (Error error = CheckPostprocess(p)) return error;
  const LogitsScan scan(p.logits, p.num_rows, p.vocab_size);
  int32_t row = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.num_wanted[r] <= p.step) continue;
    p.drafts.draft_token_ids[p.cu_num_draft[r] + p.step] = DraftOf(p, scan.Whole(row++));
  }
  WriteProbabilities(p, scan);
  row = 0;
  int32_t b = 0;
  p.out.query_start_loc[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    p.out.seq_lens[r] = 0;
    if (p.num_wanted[r] > p.step) {
      if (p.min_survival[r] >= 0 && IsImprobable(p, r)) p.num_wanted[r] = p.step + 1;
      if (p.num_wanted[r] > p.step + 1) {
        WriteNext(p, r, row, p.drafts.draft_token_ids[p.cu_num_draft[r] + p.step], b++);
        p.out.seq_lens[r] = p.num_committed[r] + p.step + 1;
      }
      ++row;
    }
    p.out.query_start_loc[r + 1] = b;
  }
  *p.out.num_continued = b;
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
