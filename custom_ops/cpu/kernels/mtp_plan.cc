#include <algorithm>

#include "fdsd/mtp.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

Error CheckTableRows(const int32_t* table_rows, int32_t num_requests, int32_t num_table_rows) {
  for (int32_t r = 0; r < num_requests; ++r)
    if (table_rows[r] < 0 || table_rows[r] >= num_table_rows)
      return "table_rows: expected rows of next_slot, got one outside";
  return nullptr;
}

Error CheckPlan(const MtpPlanParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.num_layers <= 0) return "ends: expected a row for every layer, got none";
  if (p.num_requests > p.max_requests) return "ends: expected a column for every request, got too few";
  if (p.num_steps < 0) return "num_steps: expected >= 0, got a negative number";
  if (p.num_counts <= std::max(p.num_steps, p.num_layers))
    return "num_drafting: expected more than num_steps and layers, got fewer";
  if (p.num_drafts < static_cast<int64_t>(p.num_requests) * p.num_steps)
    return "draft_token_ids: expected room for num_steps drafts of every request, got less";
  if (p.max_filled < 0) return "max_filled: expected >= 0, got a negative number";
  if (p.num_more < 0) return "num_more: expected >= 0, got a negative number";
  if (p.num_newest < 1) return "num_newest: expected at least 1, got less";
  return CheckTableRows(p.step.table_rows, p.num_requests, p.num_table_rows);
}

// What one request does in a step.
struct RequestPlan {
  int32_t begin;
  int32_t end;
  int32_t num_drafts;
};

// Whether the slots that the step made computable cannot wait.
bool MustFill(const MtpPlanParams& p, int32_t r, int32_t next_slot) {
  if (p.reads_hidden == 0) return false;
  const bool is_prompt = p.step.num_computed[r] < p.kept.num_begun[p.step.table_rows[r]];
  return is_prompt || next_slot / p.block_size < p.step.num_valid[r] / p.block_size;
}

// `max_filled`: slots that are left for this request and those after it.
RequestPlan PlanOf(const MtpPlanParams& p, int32_t r, int32_t max_filled) {
  const int32_t next_slot = p.kept.next_slot[p.step.table_rows[r]];
  int32_t begin = std::max(next_slot, p.reads_hidden);
  if (next_slot < 0 || p.step.num_valid[r] <= p.step.num_computed[r]) return {begin, begin, 0};
  const int32_t committed = p.step.num_committed[r];
  const int32_t end = std::min({p.step.num_valid[r] + 1, committed, p.step.num_kv_slots[r]});
  int32_t num_drafts = 0;
  if (end == committed) {
    // Draft i is made at slot committed - 1 + i, which needs a block and a position.
    const int32_t room = std::min(p.step.num_kv_slots[r], p.max_position) - committed + 1 - p.num_more;
    num_drafts = std::max(std::min({p.step.max_draft_len[r], p.num_steps, room}), 0);
  }
  if (num_drafts == 0 && !MustFill(p, r, next_slot)) return {begin, begin, 0};
  if (end - begin > p.num_newest) begin = end - p.num_newest;
  if (end - begin > max_filled) return {begin, begin + max_filled, 0};
  return {begin, end, num_drafts};
}

}  // namespace

Error MtpPlan(const MtpPlanParams& p) {
  if (Error error = CheckPlan(p)) return error;
  std::fill_n(p.out.num_drafting, p.num_counts, 0);
  std::fill_n(p.out.num_tokens, p.num_layers, 0);
  *p.out.num_filling = p.out.cu_num_draft[0] = p.out.draft_start_loc[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const RequestPlan plan = PlanOf(p, r, p.max_filled - p.out.num_tokens[0]);
    p.out.begin[r] = plan.begin;
    for (int32_t layer = 0; layer < p.num_layers; ++layer) {
      const int32_t end = plan.end + (plan.num_drafts > layer ? layer : 0);
      p.out.ends[static_cast<int64_t>(layer) * p.max_requests + r] = end;
      p.out.num_tokens[layer] += end - plan.begin;
    }
    for (int32_t i = 0; i < plan.num_drafts; ++i) ++p.out.num_drafting[i];
    *p.out.num_filling += plan.end > plan.begin;
    p.out.num_wanted[r] = plan.num_drafts;
    p.out.cu_num_draft[r + 1] = p.out.cu_num_draft[r] + plan.num_drafts;
    p.out.draft_start_loc[r + 1] = p.out.draft_start_loc[r] + (plan.num_drafts >= p.num_layers);
  }
  std::fill_n(p.out.draft_token_ids, p.out.cu_num_draft[p.num_requests], -1);
  return nullptr;
}

Error MtpCollect(const MtpCollectParams& p) {
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_draft[p.num_requests] > p.num_drafts) return "cu_num_draft: expected at most num_drafts last, got more";
  if (Error error = CheckTableRows(p.table_rows, p.num_requests, p.num_table_rows)) return error;
  int32_t count = 0;
  int32_t first = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.end[r] > p.begin[r]) p.next_slot[p.table_rows[r]] = p.end[r];
    const int32_t last = p.cu_num_draft[r + 1];
    for (int32_t i = first; i < last && p.draft_token_ids[i] >= 0; ++i, ++count) {
      p.draft_token_ids[count] = p.draft_token_ids[i];
      p.draft_prob[count] = p.draft_prob[i];
      p.kept[count] = i;
    }
    first = last;
    p.cu_num_draft[r + 1] = count;
  }
  return nullptr;
}

Error MtpHold(const MtpHoldParams& p) {
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_draft[p.num_requests] > p.num_drafts) return "cu_num_draft: expected at most num_drafts last, got more";
  if (Error error = CheckTableRows(p.table_rows, p.num_requests, p.num_table_rows)) return error;
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (p.cu_num_draft[r + 1] - p.cu_num_draft[r] > p.max_made)
      return "made_drafts: expected a column for every draft of a request, got too few";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.end[r] > p.begin[r]) p.next_slot[p.table_rows[r]] = p.end[r];
    int32_t* made = p.made_drafts + static_cast<int64_t>(p.table_rows[r]) * p.max_made;
    const int32_t first = p.cu_num_draft[r];
    const int32_t num_drafts = p.cu_num_draft[r + 1] - first;
    for (int32_t i = 0; i < p.max_made; ++i) made[i] = i < num_drafts ? std::max(p.draft_token_ids[first + i], 0) : 0;
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
