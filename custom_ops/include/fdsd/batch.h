#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Build the virtual-padding maps of a step from per-request counts; see Batch in fastdeploy_sd/types.py. A row finishes
// when computed + new == known; a row with drafts must finish and run at least one committed token before them. Where
// the maps have no room for T or L, only the totals are written.
struct PrepareBatchParams {
  int32_t num_requests;    // R
  int32_t max_num_tokens;  // room for T = sum(num_new)
  int32_t max_num_logits;  // room for L = sum over finishing rows of (their drafts + 1)
  int32_t num_slots;       // rows of token_table
  int32_t block_size;
  int32_t max_tokens_per_row;      // columns of token_table
  int32_t max_blocks;              // columns of block_tables
  const int32_t* num_computed;     // [R] tokens already in the KV cache
  const int32_t* num_new;          // [R] tokens to run now, drafts included
  const int32_t* num_known;        // [R] committed tokens + drafts: logits are wanted iff computed + new == known
  const int32_t* token_table;      // [num_slots, max_tokens_per_row] committed tokens of each slot
  const int32_t* slots;            // [R] row of token_table
  const int32_t* draft_token_ids;  // [D]
  const int32_t* cu_num_draft;     // [R + 1]
  const int32_t* block_tables;     // [R, max_blocks]
  struct Output {
    int32_t* input_ids;            // [T]
    int32_t* positions;            // [T]
    int64_t* slot_mapping;         // [T]
    int32_t* query_start_loc;      // [R + 1]
    int32_t* seq_lens;             // [R]
    int32_t* logits_indices;       // [L]
    int32_t* cu_num_logits;        // [R + 1]
    int32_t* batch_id_per_output;  // [L]
    int32_t* output_positions;     // [L] position of the token that the logits row is for
  } out;
  int32_t* totals;  // [2] T, L
};
Error PrepareBatch(const PrepareBatchParams& p);

// Put every row's output behind the committed tokens of its slot, and count it where a penalty wants that.
struct AppendTokensParams {
  int32_t num_requests;          // R
  int32_t num_slots;             // rows of token_table
  int32_t max_tokens_per_row;    // columns of token_table
  int32_t num_count_rows;        // rows of token_counts
  int32_t vocab_size;            // V
  const int32_t* slots;          // [R] row of token_table, none twice
  const int32_t* token_ids;      // [O]
  const int32_t* cu_num_output;  // [R + 1]
  const int32_t* count_rows;     // [R] row of token_counts, -1 = not counted
  int32_t* token_table;          // [num_slots, max_tokens_per_row]
  int32_t* num_tokens;           // [num_slots] committed tokens of each slot
  int32_t* token_counts;         // [num_count_rows, V]
};
Error AppendTokens(const AppendTokensParams& p);

// y[i] = x[indices[i]], for rows of any element type.
struct GatherOutputRowsParams {
  int32_t num_rows_in;   // T
  int32_t num_rows_out;  // L
  int64_t row_bytes;
  const void* x;           // [T, row_bytes]
  const int32_t* indices;  // [L]
  void* y;                 // [L, row_bytes]
};
Error GatherOutputRows(const GatherOutputRowsParams& p);

}  // namespace fdsd
