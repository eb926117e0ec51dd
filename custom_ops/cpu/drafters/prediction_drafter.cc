#include "prediction_drafter.h"

#include <algorithm>
#include <numeric>

#include "draft_evidence.h"
#include "random_multiplier.h"

namespace fdsd {

PredictionDrafter::PredictionDrafter(int32_t num_table_rows)
    : multiplier_(RandomMultiplier()), rows_(static_cast<size_t>(num_table_rows)) {}

Error PredictionDrafter::Begin(const PredictionBeginParams& p) {
  if (IsOutside(p.table_row)) return "table_row: expected 0 .. max_num_seqs - 1, got one outside";
  if (p.first_output < 0) return "first_output: expected >= 0, got a negative index";
  if (p.num_predicted < 0) return "num_predicted: expected >= 0, got a negative number";
  auto row = std::make_unique<Row>();
  row->text = PredictedText(p.predicted, p.num_predicted, multiplier_);
  row->begin = row->num_read = p.first_output;
  rows_[static_cast<size_t>(p.table_row)] = std::move(row);
  return nullptr;
}

Error PredictionDrafter::Forget(const int32_t* table_rows, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (IsOutside(table_rows[i])) return "table_rows: expected 0 .. max_num_seqs - 1, got one outside";
  for (int32_t i = 0; i < count; ++i) rows_[static_cast<size_t>(table_rows[i])].reset();
  return nullptr;
}

Error PredictionDrafter::CheckRows(const DraftProposeParams& p) const {
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[0] != 0)
    return "cu_num_prefix: expected to start at 0, got another";
  int64_t num_allowed = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (IsOutside(p.table_rows[r]) || p.table_rows[r] >= p.num_table_rows)
      return "table_rows: expected rows of token_table, got one outside";
    if (p.num_tokens[r] < 0 || p.num_tokens[r] > p.max_tokens_per_row)
      return "num_tokens: expected at most a row of token_table, got another number";
    const auto& row = rows_[static_cast<size_t>(p.table_rows[r])];
    if (row != nullptr && row->num_read > row->begin && p.num_tokens[r] < row->num_read)
      return "num_tokens: expected no fewer than in the table row's last step, got fewer";
    if (p.max_draft_len[r] < 0) return "max_draft_len: expected >= 0, got a negative length";
    if (p.cu_num_prefix != nullptr && p.cu_num_prefix[r + 1] < p.cu_num_prefix[r])
      return "cu_num_prefix: expected rising offsets, got a decrease";
    num_allowed += p.max_draft_len[r];
  }
  if (num_allowed > p.max_num_drafts) return "max_num_drafts: expected the sum of max_draft_len, got less";
  return nullptr;
}

// Returns how many drafts are written.
int32_t PredictionDrafter::Draft(const DraftProposeParams& p, int32_t r, Row* row) const {
  const int32_t* committed = p.token_table + static_cast<int64_t>(p.table_rows[r]) * p.max_tokens_per_row;
  const int32_t num_committed = p.num_tokens[r];
  const auto at_committed = [&](int64_t i) { return committed[i]; };
  for (; row->num_read < num_committed; ++row->num_read)
    row->follower.Read(row->text, at_committed, row->begin, row->num_read + 1);
  // Of a prompt under way nothing is read, so what would be drafted is not for the next token.
  if (p.max_draft_len[r] == 0 || num_committed < row->begin) return 0;

  PredictionFollower follower = row->follower;
  if (p.cu_num_prefix != nullptr) {
    const int32_t* prefix = p.prefix_token_ids + p.cu_num_prefix[r];
    const auto at = [&](int64_t i) { return i < num_committed ? committed[i] : prefix[i - num_committed]; };
    const int32_t num_prefix = p.cu_num_prefix[r + 1] - p.cu_num_prefix[r];
    for (int32_t i = 1; i <= num_prefix; ++i) follower.Read(row->text, at, row->begin, num_committed + int64_t{i});
  }
  const int32_t next = follower.next(row->text);
  if (next < 0) return 0;
  const int32_t num_drafts = std::min(follower.MaxDrafts(p.max_draft_len[r]), row->text.size() - next);
  int32_t* to = p.draft_token_ids + p.cu_num_draft[r];
  for (int32_t i = 0; i < num_drafts; ++i) to[i] = row->text[next + i];
  if (p.evidence != nullptr)
    DraftEvidence{follower.matched(), follower.recent(), 0}.Write(p.evidence + r * DraftEvidence::kNumFields);
  if (p.draft_prob != nullptr) std::fill_n(p.draft_prob + p.cu_num_draft[r], num_drafts, DraftEvidence::kNotCounted);
  if (p.draft_parents != nullptr)
    std::iota(p.draft_parents + p.cu_num_draft[r], p.draft_parents + p.cu_num_draft[r] + num_drafts, -1);
  return num_drafts;
}

Error PredictionDrafter::Propose(const DraftProposeParams& p) {
  if (Error error = CheckRows(p)) return error;
  p.cu_num_draft[0] = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (p.evidence != nullptr) DraftEvidence{}.Write(p.evidence + r * DraftEvidence::kNumFields);
    Row* row = rows_[static_cast<size_t>(p.table_rows[r])].get();
    p.cu_num_draft[r + 1] = p.cu_num_draft[r] + (row == nullptr ? 0 : Draft(p, r, row));
  }
  return nullptr;
}

int64_t PredictionDrafter::num_bytes() const {
  int64_t total = 0;
  for (const auto& row : rows_)
    if (row != nullptr) total += static_cast<int64_t>(sizeof(Row)) + row->text.num_bytes();
  return total;
}

CallStatus PredictionCreate(const PredictionCreateParams& p) {
  if (p.num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  *p.drafter = new PredictionDrafter(p.num_table_rows);
  return nullptr;
}

CallStatus PredictionBegin(const PredictionBeginParams& p) { return p.drafter->Begin(p); }

CallStatus PredictionForget(const DraftTableRowsParams& p) {
  return static_cast<PredictionDrafter*>(p.drafter)->Forget(p.table_rows, p.count);
}

CallStatus PredictionPropose(const DraftProposeParams& p) {
  return static_cast<PredictionDrafter*>(p.drafter)->Propose(p);
}

}  // namespace fdsd
