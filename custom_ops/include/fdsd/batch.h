#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Build the virtual-padding maps of a step from per-request counts; see Batch in fastdeploy_sd/types.py. A row finishes
// when computed + new == known; a row with drafts must finish and run at least one committed token before them.
struct PrepareBatchParams {
  int32_t num_requests;  // R
  int32_t num_tokens;    // T = sum(num_new)
  int32_t num_logits;    // L = sum over finishing rows of (their drafts + 1)
  int32_t num_slots;     // rows of token_table
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
  } out;
};
Error PrepareBatch(const PrepareBatchParams& p);

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
