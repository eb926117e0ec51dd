#pragma once
// What the rules of a request make of one of its rows of logits, and the checks of the rules' columns.
#include "fdsd/sampling.h"
#include "logits_allowed.h"
#include "logits_row.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {

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

// One row of logits: whose it is, and the drafts on its path.
struct RuledRow {
  const float* logits;
  int64_t index;  // of the L rows
  int32_t table_row;
  int32_t row;             // of its request's rows, 0 = it follows no draft
  const int32_t* drafts;   // of its request
  const int32_t* parents;  // of each of its request's rows; nullptr = the row before

  // visit(draft) for every draft that it follows, the last one first.
  template <typename Visit>
  void ForEachDraft(const Visit& visit) const {
    for (int32_t j = row; j > 0; j = parents == nullptr ? j - 1 : parents[j]) visit(drafts[j - 1]);
  }
};

inline RuledRow RuledRowOf(const LogitsRules& rules, const DraftedRows& drafted, const float* logits, int vocab_size,
                           int64_t index, int32_t request) {
  const float* row = logits + index * vocab_size;
  const int32_t table_row = rules.table_rows[request];
  if (drafted.cu_num_logits == nullptr) return RuledRow{row, index, table_row, 0, nullptr, nullptr};
  const int32_t first = drafted.cu_num_logits[request];
  return RuledRow{row,
                  index,
                  table_row,
                  static_cast<int32_t>(index) - first,
                  drafted.draft_token_ids + drafted.cu_num_draft[request],
                  drafted.parent_rows == nullptr ? nullptr : drafted.parent_rows + first};
}

inline bool HasRules(const LogitsRules& rules, int64_t index, int32_t request) {
  const int32_t table_row = rules.table_rows[request];
  return rules.count_rows[table_row] >= 0 || rules.num_bias[table_row] > 0 ||
         rules.cu_mask[index] < rules.cu_mask[index + 1] || rules.allowed.allowed_rows[index] >= 0;
}

// A row as the rules leave it: the logits of all tokens, or of some, which are listed by rising id.
struct RuledTokens {
  const float* logits;
  const int32_t* ids;  // nullptr = all
  int count;

  // The token whose logit is at a place; -1 stays.
  int32_t IdOf(int32_t place) const { return ids == nullptr || place < 0 ? place : ids[place]; }
};

// Applies the rules of a row's request to it. `rules` and `row` must outlive this.
class RowRules {
 public:
  RowRules(const LogitsRules& rules, const RuledRow& row, int vocab_size)
      : rules_(rules),
        row_(row),
        vocab_size_(vocab_size),
        allowed_(rules.allowed, row.index, vocab_size),
        penalty_{rules.repetition_penalty[row.table_row], rules.presence_penalty[row.table_row],
                 rules.frequency_penalty[row.table_row]},
        counts_(rules.count_rows[row.table_row] < 0
                    ? nullptr
                    : rules.token_counts + static_cast<int64_t>(rules.count_rows[row.table_row]) * vocab_size) {}

  // Write the whole row to y, on all threads where no task runs around this.
  void Apply(float* y) const {
    ParallelFor(CeilDiv(vocab_size_, kChunkTokens), [&](int64_t c) {
      const int begin = static_cast<int>(c) * kChunkTokens;
      CopyPenalised(begin, std::min(begin + kChunkTokens, vocab_size_), y);
    });
    CountDrafts(All{}, y);
    BiasAndMask(All{}, y);
    // Penalties are computed from raw logits. Whatever is done to -inf, it stays, so that forbidding last is the same.
    if (counts_ != nullptr && !allowed_.are_all()) allowed_.Copy(y, 0, vocab_size_, y);
  }

  // The row, or only its allowed tokens where they are few: then little is read of it. What it returns lies in
  // Scratch::kRows of the calling thread until that thread asks for another.
  RuledTokens Apply() const {
    // From here on listing tokens takes longer than copying the row.
    const int few = std::max(vocab_size_ / 32, 1);
    const int count = allowed_.are_all() ? vocab_size_ : allowed_.CountUpTo(few);
    if (count > few || allowed_.are_all()) {
      float* y = ScratchArray<float>(Scratch::kRows, vocab_size_);
      Apply(y);
      return RuledTokens{y, nullptr, vocab_size_};
    }
    int32_t* ids = ScratchArray<int32_t>(Scratch::kRows, 2 * static_cast<int64_t>(few));
    float* y = reinterpret_cast<float*>(ids + few);
    if (count == 0) {
      ids[0] = 0;
      y[0] = -kInf;
      return RuledTokens{y, ids, 1};
    }
    allowed_.List(ids);
    for (int i = 0; i < count; ++i)
      y[i] = counts_ == nullptr ? row_.logits[ids[i]] : Penalised(ids[i], counts_[ids[i]] & kCountMask);
    const Some some{ids, count};
    CountDrafts(some, y);
    BiasAndMask(some, y);
    return RuledTokens{y, ids, count};
  }

 private:
  // Where the logit of a token is, -1 = nowhere.
  struct All {
    int32_t PlaceOf(int32_t id) const { return id; }
  };
  struct Some {
    const int32_t* ids;
    int count;

    int32_t PlaceOf(int32_t id) const {
      const int32_t* found = std::lower_bound(ids, ids + count, id);
      return found < ids + count && *found == id ? static_cast<int32_t>(found - ids) : -1;
    }
  };

  // Tokens [begin, end), with the penalties of tokens seen before this step.
  void CopyPenalised(int begin, int end, float* y) const {
    constexpr int kSpan = 16;  // tokens tested together for having been seen at all
    if (counts_ == nullptr && !allowed_.are_all()) return allowed_.Copy(row_.logits, begin, end, y);
    std::memcpy(y + begin, row_.logits + begin, static_cast<size_t>(end - begin) * sizeof(float));
    if (counts_ == nullptr) return;
    for (int span = begin; span < end; span += kSpan) {
      const int span_end = std::min(span + kSpan, end);
      int32_t any = 0;
      for (int id = span; id < span_end; ++id) any |= counts_[id];
      if (any == 0) continue;
      for (int id = span; id < span_end; ++id) y[id] = Penalised(id, counts_[id] & kCountMask);
    }
  }

  // Penalise the drafted tokens again, from the raw logit, with the drafts on the row's path counted as output.
  template <typename Tokens>
  void CountDrafts(const Tokens& tokens, float* y) const {
    if (counts_ == nullptr) return;
    row_.ForEachDraft([&](int32_t id) {
      const int32_t place = tokens.PlaceOf(id);
      if (place < 0) return;
      int32_t count = counts_[id] & kCountMask;
      row_.ForEachDraft([&](int32_t other) { count += other == id; });
      y[place] = Penalised(id, count);
    });
  }

  template <typename Tokens>
  void BiasAndMask(const Tokens& tokens, float* y) const {
    const int64_t first = static_cast<int64_t>(row_.table_row) * rules_.max_num_bias;
    for (int64_t b = first; b < first + rules_.num_bias[row_.table_row]; ++b)
      if (const int32_t place = tokens.PlaceOf(rules_.bias_token_ids[b]); place >= 0) y[place] += rules_.bias_values[b];
    for (int32_t m = rules_.cu_mask[row_.index]; m < rules_.cu_mask[row_.index + 1]; ++m)
      if (const int32_t place = tokens.PlaceOf(rules_.mask_token_ids[m]); place >= 0) y[place] = -kInf;
  }

  float Penalised(int32_t id, int32_t count) const {
    return penalty_.Apply(row_.logits[id], count, (counts_[id] & kInPrompt) != 0);
  }

  const LogitsRules& rules_;
  const RuledRow& row_;
  int vocab_size_;
  AllowedTokens allowed_;
  Penalty penalty_;
  const int32_t* counts_;  // of the tokens seen before this step; nullptr = no penalty applies
};

inline bool AreBelow(int32_t limit, const int32_t* values, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

// NaN is not.
inline bool IsWithin(float low, float value, float high) { return value >= low && value <= high; }

inline Error CheckDraftedRows(const DraftedRows& drafted, int32_t num_requests, int32_t num_rows) {
  if (!AreOffsets(drafted.cu_num_logits, num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (drafted.cu_num_logits[num_requests] != num_rows)
    return "cu_num_logits: expected the rows of logits last, got another";
  if (!AreOffsets(drafted.cu_num_draft, num_requests))
    return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  for (int32_t r = 0; r < num_requests; ++r) {
    const int32_t num_draft = drafted.cu_num_draft[r + 1] - drafted.cu_num_draft[r];
    if (drafted.cu_num_logits[r + 1] - drafted.cu_num_logits[r] > num_draft + 1)
      return "cu_num_logits: expected at most drafts + 1 rows per request, got more";
  }
  return drafted.parent_rows == nullptr ? nullptr
                                        : CheckParentRows(drafted.parent_rows, drafted.cu_num_logits, num_requests);
}

inline Error CheckTableRows(const LogitsRules& rules, int32_t num_requests) {
  if (AreBelow(rules.num_table_rows, rules.table_rows, num_requests)) return nullptr;
  return "table_rows: expected rows of the request columns, got one outside";
}

// The counts are looked up by draft, so drafts must be ids of the vocabulary where there is a penalty.
inline Error CheckPenalty(const LogitsRules& rules, const DraftedRows& drafted, int32_t request, int vocab_size) {
  const int32_t r = rules.table_rows[request];
  if (rules.count_rows[r] < 0) return nullptr;
  if (rules.count_rows[r] >= rules.num_count_rows)
    return "count_rows: expected a row of token_counts or -1, got one outside";
  if (!IsWithin(1e-3f, rules.repetition_penalty[r], 1e3f))
    return "repetition_penalty: expected a number in 0.001..1000, got another";
  if (!IsWithin(-2.0f, rules.presence_penalty[r], 2.0f))
    return "presence_penalty: expected a number in -2..2, got another";
  if (!IsWithin(-2.0f, rules.frequency_penalty[r], 2.0f))
    return "frequency_penalty: expected a number in -2..2, got another";
  if (drafted.cu_num_draft == nullptr) return nullptr;
  const int32_t first = drafted.cu_num_draft[request];
  if (!AreBelow(vocab_size, drafted.draft_token_ids + first, drafted.cu_num_draft[request + 1] - first))
    return "draft_token_ids: expected ids of the vocabulary, got one outside";
  return nullptr;
}

inline Error CheckBiases(const LogitsRules& rules, int32_t request, int vocab_size) {
  const int32_t num_bias = rules.num_bias[rules.table_rows[request]];
  if (num_bias < 0 || num_bias > rules.max_num_bias) return "num_bias: expected 0..max_num_bias, got a number outside";
  const int64_t first = static_cast<int64_t>(rules.table_rows[request]) * rules.max_num_bias;
  if (!AreBelow(vocab_size, rules.bias_token_ids + first, num_bias))
    return "bias_token_ids: expected ids of the vocabulary, got one outside";
  for (int32_t b = 0; b < num_bias; ++b)
    if (!IsWithin(-100.0f, rules.bias_values[first + b], 100.0f))
      return "bias_values: expected numbers in -100..100, got another";
  return nullptr;
}

inline Error CheckRules(const LogitsRules& rules, const DraftedRows& drafted, int32_t num_requests, int32_t num_rows,
                        int vocab_size) {
  if (!AreOffsets(rules.cu_mask, num_rows)) return "cu_mask: expected 0 and rising offsets, got a decrease";
  if (!AreBelow(vocab_size, rules.mask_token_ids, rules.cu_mask[num_rows]))
    return "mask_token_ids: expected ids of the vocabulary, got one outside";
  if (num_rows > 0 && rules.allowed.num_allowed > 0 && rules.allowed.num_allowed_words < CeilDiv(vocab_size, 32))
    return "allowed_bits: expected a bit for every token of the vocabulary, got fewer";
  for (int32_t row = 0; row < num_rows; ++row)
    if (rules.allowed.allowed_rows[row] < -1 || rules.allowed.allowed_rows[row] >= rules.allowed.num_allowed)
      return "allowed_rows: expected rows of allowed_bits or -1, got one outside";
  for (int32_t r = 0; r < num_requests; ++r) {
    if (Error error = CheckBiases(rules, r, vocab_size)) return error;
    if (Error error = CheckPenalty(rules, drafted, r, vocab_size)) return error;
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
