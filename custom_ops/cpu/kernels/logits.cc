#include <algorithm>
#include <cstring>
#include <limits>

#include "fdsd/sampling.h"
#include "offsets.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr int kTaskTokens = 16384;  // tokens of a row per task
constexpr int kSpan = 16;           // tokens tested together for having been seen at all
constexpr int32_t kInPrompt = 1 << 30;
constexpr int32_t kCountMask = kInPrompt - 1;

struct Penalty {
  float repetition;
  float presence;
  float frequency;

  float Apply(float logit, int32_t count, bool in_prompt) const {
    if (count > 0 || in_prompt) logit = logit > 0.0f ? logit / repetition : logit * repetition;
    if (count > 0) logit = logit - frequency * static_cast<float>(count) - presence;
    return logit;
  }
};

// The requests' parameters, by processed row.
class Rows {
 public:
  explicit Rows(const ProcessLogitsParams& p) : p_(p), request_of_(ScratchArray<int32_t>(Scratch::kRows, p.num_rows)) {
    for (int32_t r = 0; r < p.num_requests; ++r)
      for (int32_t row = p.cu_num_logits[r]; row < p.cu_num_logits[r + 1]; ++row) request_of_[row] = r;
  }

  // The row of logits.
  int64_t source(int64_t row) const { return p_.rows[row]; }
  int32_t request(int64_t row) const { return request_of_[source(row)]; }
  const float* logits(int64_t row) const { return p_.logits + source(row) * p_.vocab_size; }
  float* y(int64_t row) const { return p_.y + row * p_.vocab_size; }

  // Counts of the tokens seen before this step, or nullptr when no penalty applies.
  const int32_t* counts(int64_t row) const {
    const int32_t slot = p_.penalties.slot[request(row)];
    return slot < 0 ? nullptr : p_.penalties.token_counts + static_cast<int64_t>(slot) * p_.vocab_size;
  }
  Penalty penalty(int64_t row) const {
    const int32_t r = request(row);
    return Penalty{p_.penalties.repetition[r], p_.penalties.presence[r], p_.penalties.frequency[r]};
  }
  // The drafts before this row: as many as there are rows of its request before it.
  const int32_t* drafts(int64_t row) const { return p_.draft_token_ids + p_.cu_num_draft[request(row)]; }
  int32_t num_drafts_before(int64_t row) const { return p_.rows[row] - p_.cu_num_logits[request(row)]; }

 private:
  const ProcessLogitsParams& p_;
  int32_t* request_of_;
};

// Copy tokens [begin, end) of a row, with the penalties of tokens seen before this step.
void CopyPenalised(const Rows& rows, int64_t row, int begin, int end) {
  const float* logits = rows.logits(row);
  const int32_t* counts = rows.counts(row);
  float* y = rows.y(row);
  std::memcpy(y + begin, logits + begin, static_cast<size_t>(end - begin) * sizeof(float));
  if (counts == nullptr) return;
  const Penalty penalty = rows.penalty(row);
  for (int span = begin; span < end; span += kSpan) {
    const int span_end = std::min(span + kSpan, end);
    int32_t any = 0;
    for (int id = span; id < span_end; ++id) any |= counts[id];
    if (any == 0) continue;
    for (int id = span; id < span_end; ++id)
      y[id] = penalty.Apply(logits[id], counts[id] & kCountMask, (counts[id] & kInPrompt) != 0);
  }
}

// Penalise the drafted tokens again, from the raw logit, with the drafts before the row counted as output.
void CountDrafts(const Rows& rows, int64_t row) {
  const int32_t* counts = rows.counts(row);
  if (counts == nullptr) return;
  const int32_t* drafts = rows.drafts(row);
  const int32_t num_drafts = rows.num_drafts_before(row);
  for (int32_t d = 0; d < num_drafts; ++d) {
    const int32_t id = drafts[d];
    int32_t count = counts[id] & kCountMask;
    for (int32_t e = 0; e < num_drafts; ++e) count += drafts[e] == id;
    rows.y(row)[id] = rows.penalty(row).Apply(rows.logits(row)[id], count, (counts[id] & kInPrompt) != 0);
  }
}

void BiasAndMask(const ProcessLogitsParams& p, const Rows& rows, int64_t row) {
  float* y = rows.y(row);
  const int32_t r = rows.request(row);
  for (int32_t b = p.bias.cu[r]; b < p.bias.cu[r + 1]; ++b) y[p.bias.token_ids[b]] += p.bias.values[b];
  const int64_t source = rows.source(row);
  for (int32_t m = p.mask.cu[source]; m < p.mask.cu[source + 1]; ++m)
    y[p.mask.token_ids[m]] = -std::numeric_limits<float>::infinity();
}

bool AreBelow(int32_t limit, const int32_t* values, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

Error CheckRequest(const ProcessLogitsParams& p, int32_t r) {
  const int32_t num_draft = p.cu_num_draft[r + 1] - p.cu_num_draft[r];
  const int32_t num_logits = p.cu_num_logits[r + 1] - p.cu_num_logits[r];
  if (num_logits > num_draft + 1) return "cu_num_logits: expected at most drafts + 1 rows per request, got more";
  if (p.penalties.slot[r] >= p.num_slots) return "penalty_slot: expected a row of token_counts or -1, got one outside";
  if (p.penalties.slot[r] >= 0 && !(p.penalties.repetition[r] > 0.0f))
    return "repetition_penalty: expected a positive number, got another";
  return nullptr;
}

Error CheckAll(const ProcessLogitsParams& p) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (!AreOffsets(p.cu_num_logits, p.num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_logits[p.num_requests] != p.num_rows)
    return "cu_num_logits: expected the rows of logits last, got another";
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.bias.cu, p.num_requests)) return "cu_bias: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.mask.cu, p.num_rows)) return "cu_mask: expected 0 and rising offsets, got a decrease";
  if (!AreBelow(p.num_rows, p.rows, p.num_processed)) return "rows: expected rows of logits, got one outside";
  if (!AreBelow(p.vocab_size, p.draft_token_ids, p.cu_num_draft[p.num_requests]))
    return "draft_token_ids: expected ids of the vocabulary, got one outside";
  if (!AreBelow(p.vocab_size, p.bias.token_ids, p.bias.cu[p.num_requests]))
    return "bias_token_ids: expected ids of the vocabulary, got one outside";
  if (!AreBelow(p.vocab_size, p.mask.token_ids, p.mask.cu[p.num_rows]))
    return "mask_token_ids: expected ids of the vocabulary, got one outside";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (Error error = CheckRequest(p, r)) return error;
  return nullptr;
}

}  // namespace

Error ProcessLogits(const ProcessLogitsParams& p) {
  if (Error error = CheckAll(p)) return error;
  const Rows rows(p);
  const int64_t tasks_per_row = (p.vocab_size + kTaskTokens - 1) / kTaskTokens;
  ParallelFor(p.num_processed * tasks_per_row, [&](int64_t task) {
    const int begin = static_cast<int>(task % tasks_per_row) * kTaskTokens;
    CopyPenalised(rows, task / tasks_per_row, begin, std::min(begin + kTaskTokens, p.vocab_size));
  });
  for (int64_t row = 0; row < p.num_processed; ++row) {
    CountDrafts(rows, row);
    BiasAndMask(p, rows, row);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
