#include "fdsd/batch.h"

#include <algorithm>
#include <cstring>

#include "fdsd/attention.h"
#include "offsets.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows copied per task: small rows would otherwise cost more to hand out than to copy.
constexpr int64_t kGatherBytesPerTask = 1 << 18;

struct RequestRow {
  int32_t num_computed;
  int32_t num_new;
  int32_t num_committed;
  int32_t num_draft;
  bool finishes;  // the step reaches the last known token, so the row wants logits
  const int32_t* tokens;
  const int32_t* drafts;
  const int32_t* parents;  // of the drafts; nullptr = they are a chain
  const int32_t* blocks;

  int32_t seq_len() const { return num_computed + num_new; }
  int32_t num_logits() const { return finishes ? num_draft + 1 : 0; }
  int32_t num_before_drafts() const { return num_new - num_draft; }
};

RequestRow RowOf(const PrepareBatchParams& p, int32_t r) {
  const int32_t table_row = p.table_rows[r];
  RequestRow row;
  row.num_computed = p.plan.num_computed[r];
  row.num_new = p.plan.num_new[r];
  row.num_draft = p.plan.cu_num_draft[r + 1] - p.plan.cu_num_draft[r];
  row.num_committed = p.num_tokens[table_row];
  row.finishes = row.seq_len() == row.num_committed + row.num_draft;
  row.tokens = p.token_table + static_cast<int64_t>(table_row) * p.max_tokens_per_row;
  row.drafts = p.plan.draft_token_ids + p.plan.cu_num_draft[r];
  row.parents = p.plan.draft_parents == nullptr ? nullptr : p.plan.draft_parents + p.plan.cu_num_draft[r];
  row.blocks = p.block_tables + static_cast<int64_t>(table_row) * p.max_blocks;
  return row;
}

Error CheckCounts(const PrepareBatchParams& p, int32_t r) {
  const int32_t table_row = p.table_rows[r];
  if (p.plan.num_computed[r] < 0) return "num_computed: expected >= 0, got a negative count";
  if (p.plan.num_new[r] < 1) return "num_new: expected >= 1, got less";
  if (table_row < 0 || table_row >= p.num_table_rows)
    return "table_rows: expected rows of token_table, got one outside";
  if (p.num_tokens[table_row] < 0 || p.num_tokens[table_row] > p.max_tokens_per_row)
    return "num_tokens: expected at most a row of token_table, got another number";
  const int64_t num_draft = p.plan.cu_num_draft[r + 1] - p.plan.cu_num_draft[r];
  const int64_t num_known = p.num_tokens[table_row] + num_draft;
  const int64_t seq_len = static_cast<int64_t>(p.plan.num_computed[r]) + p.plan.num_new[r];
  if (seq_len > num_known) return "num_new: expected computed + new <= committed tokens + drafts, got more";
  if (num_draft > 0 && seq_len != num_known)
    return "num_draft: expected drafts only where every known token is run, got some elsewhere";
  if (num_draft > 0 && num_draft >= p.plan.num_new[r])
    return "num_draft: expected less than num_new, got as many or more";
  return nullptr;
}

// Nothing that branches has more rows than a tree may have; chains have any number.
Error CheckParents(const RequestRow& row) {
  if (row.parents == nullptr) return nullptr;
  bool is_chain = true;
  for (int32_t d = 0; d < row.num_draft; ++d) {
    if (row.parents[d] < -1 || row.parents[d] >= d)
      return "draft_parents: expected an earlier draft of the request or -1, got another";
    is_chain &= row.parents[d] == d - 1;
  }
  if (!is_chain && row.num_new > kMaxTreeRows)
    return "draft_parents: expected a chain in a request of more than 64 new tokens, got a tree";
  return nullptr;
}

Error CheckBlocks(const PrepareBatchParams& p, int32_t r) {
  const RequestRow row = RowOf(p, r);
  const int32_t num_blocks = (row.seq_len() - 1) / p.block_size + 1;
  if (num_blocks > p.max_blocks) return "block_tables: expected blocks for every token, got too few columns";
  // No layer need have those before.
  for (int32_t b = row.num_computed / p.block_size; b < num_blocks; ++b)
    if (row.blocks[b] < 0) return "block_tables: expected blocks for every token, got -1 among them";
  return nullptr;
}

Error CheckBatch(const PrepareBatchParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (!AreOffsets(p.plan.cu_num_draft, p.num_requests))
    return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  int64_t num_tokens = 0;
  int64_t num_logits = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (Error error = CheckCounts(p, r)) return error;
    if (Error error = CheckParents(RowOf(p, r))) return error;
    if (Error error = CheckBlocks(p, r)) return error;
    num_tokens += p.plan.num_new[r];
    num_logits += RowOf(p, r).num_logits();
  }
  if (num_tokens > p.max_num_tokens) return "num_new: expected at most max_num_tokens together, got more";
  if (num_logits > p.max_num_logits) return "num_draft: expected at most max_num_logits rows of logits, got more";
  return nullptr;
}

// Row i of the request is token `place` of those that it has and drafts; in a tree that is not its position.
void WriteTokens(const PrepareBatchParams& p, const RequestRow& row, int32_t first) {
  for (int32_t i = 0; i < row.num_new; ++i) {
    const int32_t place = row.num_computed + i;
    const int32_t draft = place - row.num_committed;
    const int32_t parent = draft >= 0 && row.parents != nullptr ? row.num_before_drafts() + row.parents[draft] : i - 1;
    const int32_t t = first + i;
    p.out.input_ids[t] = draft >= 0 ? row.drafts[draft] : row.tokens[place];
    p.out.positions[t] = i == 0 ? place : p.out.positions[first + parent] + 1;
    p.out.slot_mapping[t] =
        static_cast<int64_t>(row.blocks[place / p.block_size]) * p.block_size + place % p.block_size;
    if (row.num_new > kMaxTreeRows) continue;
    p.out.tree_mask[t] = i == 0 ? 0 : p.out.tree_mask[first + parent] | static_cast<int64_t>(uint64_t{1} << parent);
  }
}

void WriteLogitsRows(const PrepareBatchParams& p, const RequestRow& row, int32_t r, int32_t first, int32_t end) {
  for (int32_t k = 0; k < row.num_logits(); ++k) {
    const int32_t t = end - row.num_logits() + k;
    p.out.logits_indices[first + k] = t;
    p.out.batch_id_per_output[first + k] = r;
    p.out.output_positions[first + k] = p.out.positions[t] + 1;
    p.out.parent_rows[first + k] = k > 0 && row.parents != nullptr ? row.parents[k - 1] + 1 : k - 1;
  }
}

Error CheckOutput(const AppendTokensParams& p, int32_t r) {
  const int32_t table_row = p.table_rows[r];
  if (table_row < 0 || table_row >= p.num_table_rows)
    return "table_rows: expected rows of token_table, got one outside";
  const int32_t num_output = p.cu_num_output[r + 1] - p.cu_num_output[r];
  const int32_t num_tokens = p.table.num_tokens[table_row];
  if (num_tokens < 0 || num_tokens > p.max_tokens_per_row - num_output)
    return "num_tokens: expected room for the output in token_table, got too little";
  const int32_t count_row = p.table.count_rows[table_row];
  if (count_row < 0) return nullptr;
  if (count_row >= p.num_count_rows) return "count_rows: expected a row of token_counts or -1, got one outside";
  for (int32_t i = p.cu_num_output[r]; i < p.cu_num_output[r + 1]; ++i)
    if (p.token_ids[i] < 0 || p.token_ids[i] >= p.vocab_size)
      return "token_ids: expected ids of the vocabulary, got one outside";
  return nullptr;
}

// A row that came twice could outgrow its length, for which CheckOutput looks at each output by itself.
Error CheckTableRowsDiffer(const AppendTokensParams& p) {
  bool* is_used = ScratchArray<bool>(Scratch::kOp, p.num_table_rows);
  std::fill_n(is_used, p.num_table_rows, false);
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (is_used[p.table_rows[r]]) return "table_rows: expected every one once, got one twice";
    is_used[p.table_rows[r]] = true;
  }
  return nullptr;
}

void AppendRow(const AppendTokensParams& p, int32_t r) {
  const int32_t table_row = p.table_rows[r];
  const int32_t* token_ids = p.token_ids + p.cu_num_output[r];
  const int32_t num_output = p.cu_num_output[r + 1] - p.cu_num_output[r];
  int32_t& num_tokens = p.table.num_tokens[table_row];
  std::copy_n(token_ids, num_output,
              p.table.tokens + static_cast<int64_t>(table_row) * p.max_tokens_per_row + num_tokens);
  num_tokens += num_output;
  const int32_t room = std::max(p.table.max_total[table_row] - num_tokens - 1, 0);
  p.num_committed[r] = num_tokens;
  p.max_draft_len[r] = num_output > 0 ? std::min(p.planned_drafts[r], room) : 0;
  if (p.table.count_rows[table_row] < 0) return;
  int32_t* counts = p.table.token_counts + static_cast<int64_t>(p.table.count_rows[table_row]) * p.vocab_size;
  for (int32_t i = 0; i < num_output; ++i) ++counts[token_ids[i]];
}

}  // namespace

Error PrepareBatch(const PrepareBatchParams& p) {
  if (Error error = CheckBatch(p)) return error;
  int32_t t = 0;
  int32_t l = 0;
  p.out.query_start_loc[0] = 0;
  p.out.cu_num_logits[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const RequestRow row = RowOf(p, r);
    WriteTokens(p, row, t);
    t += row.num_new;
    WriteLogitsRows(p, row, r, l, t);
    l += row.num_logits();
    p.out.seq_lens[r] = row.seq_len();
    p.out.query_start_loc[r + 1] = t;
    p.out.cu_num_logits[r + 1] = l;
  }
  return nullptr;
}

Error AppendTokens(const AppendTokensParams& p) {
  if (!AreOffsets(p.cu_num_output, p.num_requests))
    return "cu_num_output: expected 0 and rising offsets, got a decrease";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (Error error = CheckOutput(p, r)) return error;
  if (Error error = CheckTableRowsDiffer(p)) return error;
  for (int32_t r = 0; r < p.num_requests; ++r) AppendRow(p, r);
  return nullptr;
}

Error GatherOutputRows(const GatherOutputRowsParams& p) {
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  for (int32_t i = 0; i < p.num_rows_out; ++i)
    if (p.indices[i] < 0 || p.indices[i] >= p.num_rows_in) return "indices: expected rows of x, got one outside";
  if (p.row_bytes == 0) return nullptr;
  const int64_t rows_per_task = std::max<int64_t>(1, kGatherBytesPerTask / p.row_bytes);
  const int64_t num_tasks = (p.num_rows_out + rows_per_task - 1) / rows_per_task;
  ParallelFor(num_tasks, [&](int64_t task) {
    const int64_t end = std::min<int64_t>(p.num_rows_out, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i)
      std::memcpy(static_cast<char*>(p.y) + i * p.row_bytes, static_cast<const char*>(p.x) + p.indices[i] * p.row_bytes,
                  static_cast<size_t>(p.row_bytes));
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
