#include <algorithm>

#include "fdsd/batch.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// How many positions earlier request r runs than its maps say.
int32_t ShiftOf(const SettleStepParams& p, int32_t r) {
  return std::max(p.maps.num_computed[r] - (p.num_tokens[p.table_rows[r]] - 1), 0);
}

Error CheckSettled(const SettleStepParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  for (const int32_t* cu : {p.rows.query_start_loc, p.rows.cu_num_logits, p.rows.cu_num_draft})
    if (!AreOffsets(cu, p.num_requests)) return "query_start_loc: expected 0 and rising offsets, got a decrease";
  if (p.rows.query_start_loc[p.num_requests] > p.num_ids)
    return "query_start_loc: expected to end within input_ids, got more";
  if (p.rows.cu_num_logits[p.num_requests] > p.num_logits)
    return "cu_num_logits: expected to end within output_positions, got more";
  if (p.rows.cu_num_draft[p.num_requests] > p.num_drafts)
    return "cu_num_draft: expected to end within draft_token_ids, got more";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t num_new = p.rows.query_start_loc[r + 1] - p.rows.query_start_loc[r];
    if (num_new == 0) continue;
    const int32_t table_row = p.table_rows[r];
    if (table_row < 0 || table_row >= p.num_table_rows)
      return "table_rows: expected rows of token_table, got one outside";
    if (p.num_tokens[table_row] < 1 || p.num_tokens[table_row] > p.max_tokens_per_row)
      return "num_tokens: expected at most a row of token_table, got another number";
    const int32_t begin = p.maps.num_computed[r] - ShiftOf(p, r);
    if (begin < 0) return "num_computed: expected >= 0, got a negative count";
    const int32_t num_drafts = p.rows.cu_num_draft[r + 1] - p.rows.cu_num_draft[r];
    if (num_drafts > p.max_made) return "cu_num_draft: expected at most max_made drafts of a request, got more";
    if (begin + num_new > p.num_tokens[table_row] + num_drafts)
      return "num_computed: expected computed + new <= committed tokens + drafts, got more";
    const int32_t* blocks = p.block_tables + static_cast<int64_t>(table_row) * p.max_blocks;
    if ((begin + num_new - 1) / p.block_size >= p.max_blocks)
      return "block_tables: expected blocks for every token, got too few columns";
    for (int32_t b = begin / p.block_size; b <= (begin + num_new - 1) / p.block_size; ++b)
      if (blocks[b] < 0) return "block_tables: expected blocks for every token, got -1 among them";
  }
  return nullptr;
}

void SettleRow(const SettleStepParams& p, int32_t r) {
  const int32_t first = p.rows.query_start_loc[r];
  const int32_t num_new = p.rows.query_start_loc[r + 1] - first;
  if (num_new == 0) return;
  const int64_t table_row = p.table_rows[r];
  const int32_t num_tokens = p.num_tokens[table_row];
  const int32_t shift = ShiftOf(p, r);
  int32_t* drafts = p.maps.draft_token_ids + p.rows.cu_num_draft[r];
  for (int32_t i = 0; i < p.rows.cu_num_draft[r + 1] - p.rows.cu_num_draft[r]; ++i)
    if (drafts[i] < 0) drafts[i] = p.made_drafts[table_row * p.max_made + i];
  p.maps.num_computed[r] -= shift;
  p.maps.seq_lens[r] -= shift;
  for (int32_t i = 0; i < num_new; ++i) {
    const int32_t place = p.maps.num_computed[r] + i;
    const int64_t block = p.block_tables[table_row * p.max_blocks + place / p.block_size];
    p.maps.positions[first + i] -= shift;
    p.maps.slot_mapping[first + i] = block * p.block_size + place % p.block_size;
    p.maps.input_ids[first + i] =
        place < num_tokens ? p.token_table[table_row * p.max_tokens_per_row + place] : drafts[place - num_tokens];
  }
  for (int32_t l = p.rows.cu_num_logits[r]; l < p.rows.cu_num_logits[r + 1]; ++l) p.maps.output_positions[l] -= shift;
}

Error CheckGroupRow(const GroupSlotsParams& p, int32_t r) {
  if (p.table_rows[r] < 0 || p.table_rows[r] >= p.num_table_rows)
    return "table_rows: expected rows of block_tables, got one outside";
  const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
  if (num_rows == 0) return nullptr;
  const int32_t first = p.seq_lens[r] - num_rows;
  const int32_t last = p.seq_lens[r] - 1;
  if (first < 0 || last / p.block_size >= p.max_blocks)
    return "seq_lens: expected at least the rows and at most the columns of block_tables, got another length";
  const int32_t* blocks = p.block_tables + static_cast<int64_t>(p.table_rows[r]) * p.max_blocks;
  for (int32_t b = first / p.block_size; b <= last / p.block_size; ++b)
    if (blocks[b] < 0) return "block_tables: expected blocks for every token, got -1 among them";
  return nullptr;
}

}  // namespace

Error SettleStep(const SettleStepParams& p) {
  if (Error error = CheckSettled(p)) return error;
  for (int32_t r = 0; r < p.num_requests; ++r) SettleRow(p, r);
  return nullptr;
}

Error GroupSlots(const GroupSlotsParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (!AreOffsets(p.query_start_loc, p.num_requests))
    return "query_start_loc: expected 0 and rising offsets, got a decrease";
  if (p.query_start_loc[p.num_requests] > p.num_tokens)
    return "query_start_loc: expected to end within slot_mapping, got more";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (Error error = CheckGroupRow(p, r)) return error;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t* blocks = p.block_tables + static_cast<int64_t>(p.table_rows[r]) * p.max_blocks;
    for (int32_t t = p.query_start_loc[r]; t < p.query_start_loc[r + 1]; ++t) {
      const int32_t place = p.seq_lens[r] - (p.query_start_loc[r + 1] - t);
      p.slot_mapping[t] = p.first_slots[t] < 0 ? -1
                                               : static_cast<int64_t>(blocks[place / p.block_size]) * p.block_size +
                                                     place % p.block_size;
    }
  }
  std::fill(p.slot_mapping + p.query_start_loc[p.num_requests], p.slot_mapping + p.num_tokens, -1);
  return nullptr;
}

Error RowRequests(const RowRequestsParams& p) {
  if (!AreOffsets(p.query_start_loc, p.num_requests))
    return "query_start_loc: expected 0 and rising offsets, got a decrease";
  const int32_t num_own = p.query_start_loc[p.num_requests];
  if (num_own > p.num_rows) return "query_start_loc: expected to end within num_rows, got more";
  for (int32_t r = 0; r < p.num_requests; ++r)
    for (int32_t t = p.query_start_loc[r]; t < p.query_start_loc[r + 1]; ++t) {
      p.row_table_rows[t] = p.table_rows[r];
      p.row_lens[t] = p.seq_lens[r];
    }
  std::fill(p.row_table_rows + num_own, p.row_table_rows + p.num_rows, 0);
  std::fill(p.row_lens + num_own, p.row_lens + p.num_rows, 0);
  for (int32_t t = 0; t <= p.num_rows; ++t) p.row_starts[t] = std::min(t, num_own);
  return nullptr;
}

Error TargetStep(const TargetStepParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (!AreOffsets(p.cu_num_logits, p.num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.cu_num_output, p.num_requests))
    return "cu_num_output: expected 0 and rising offsets, got a decrease";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (p.table_rows[r] < 0 || p.table_rows[r] >= p.num_table_rows)
      return "table_rows: expected rows of num_blocks, got one outside";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const bool has_output = p.cu_num_output[r + 1] > p.cu_num_output[r];
    // A row whose tokens were all run and that has no output nevertheless has failed, or runs its newest token again.
    const int32_t num_logits = p.cu_num_logits[r + 1] - p.cu_num_logits[r];
    const int32_t num_run = p.num_computed[r] + p.num_new[r] - num_logits;
    const int64_t num_slots = static_cast<int64_t>(p.num_blocks[p.table_rows[r]]) * p.block_size;
    p.num_valid[r] = has_output ? p.num_committed[r] - 1 : num_run;
    // The last block may reach past the model's length, where the rotary table ends.
    p.num_kv_slots[r] = static_cast<int32_t>(std::min<int64_t>(num_slots, p.max_tokens_per_row));
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
