#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Build the virtual-padding maps of a step from per-request counts; see BatchMaps in fastdeploy_sd/ops/reference/
// batch.py. Request r is row table_rows[r] of the worker's table. It finishes when computed + new are all its committed
// tokens and drafts; one with drafts must finish and run at least one committed token before them. Nothing is written
// on an error.
struct PrepareBatchParams {
  int32_t num_requests;        // R
  int32_t max_num_tokens;      // room for T = sum(num_new)
  int32_t max_num_logits;      // room for L = sum over finishing rows of (their drafts + 1)
  int32_t num_table_rows;      // S
  int32_t max_tokens_per_row;  // columns of token_table
  int32_t max_blocks;          // columns of block_tables
  int32_t block_size;
  const int32_t* table_rows;    // [R]
  const int32_t* token_table;   // [S, max_tokens_per_row] committed tokens
  const int32_t* num_tokens;    // [S] how many of a row are committed
  const int32_t* block_tables;  // [S, max_blocks] padded with -1
  struct Plan {
    const int32_t* num_computed;     // [R] tokens already in the KV cache
    const int32_t* num_new;          // [R] tokens to run now, drafts included
    const int32_t* draft_token_ids;  // [D]
    const int32_t* cu_num_draft;     // [R + 1]
    const int32_t* draft_parents;    // [D] the draft of its request that each follows, -1 = none; nullptr = chains
  } plan;
  struct Output {
    int32_t* input_ids;            // [T]
    int32_t* positions;            // [T]
    int64_t* slot_mapping;         // [T]
    int64_t* tree_mask;            // [T] see CascadeAppendAttentionParams; only of requests with at most kMaxTreeRows
    int32_t* query_start_loc;      // [R + 1]
    int32_t* seq_lens;             // [R]
    int32_t* logits_indices;       // [L]
    int32_t* cu_num_logits;        // [R + 1]
    int32_t* batch_id_per_output;  // [L]
    int32_t* output_positions;     // [L] position of the token that the logits row is for
    int32_t* parent_rows;          // [L] see DraftedRows
  } out;
};
Error PrepareBatch(const PrepareBatchParams& p);

// Resolve the lengths of a step that was prepared before the tokens of the step before it were known. Its maps count as
// many tokens as there can be. A request that has fewer runs its newest one and its drafts as much earlier, in its own
// blocks. Ids of known tokens come from the token table; a draft that is -1 was made on the device and is in
// made_drafts. A step whose tokens were known stays what it is. Nothing is written on an error.
struct SettleStepParams {
  int32_t num_requests;        // R
  int32_t num_ids;             // T
  int32_t num_logits;          // L
  int32_t num_drafts;          // room in draft_token_ids
  int32_t num_table_rows;      // S
  int32_t max_tokens_per_row;  // columns of token_table
  int32_t max_blocks;          // columns of block_tables
  int32_t max_made;            // columns of made_drafts
  int32_t block_size;
  const int32_t* table_rows;    // [R]
  const int32_t* token_table;   // [S, max_tokens_per_row] committed tokens
  const int32_t* num_tokens;    // [S] how many of a row are committed
  const int32_t* block_tables;  // [S, max_blocks] padded with -1
  const int32_t* made_drafts;   // [S, max_made] what follows them
  struct Rows {
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* cu_num_logits;    // [R + 1]
    const int32_t* cu_num_draft;     // [R + 1]
  } rows;
  struct Maps {
    int32_t* input_ids;         // [T]
    int32_t* positions;         // [T]
    int64_t* slot_mapping;      // [T]
    int32_t* num_computed;      // [R] becomes less by as much as the request has moved, as do the others
    int32_t* seq_lens;          // [R]
    int32_t* output_positions;  // [L]
    int32_t* draft_token_ids;   // [num_drafts]
  } maps;
};
Error SettleStep(const SettleStepParams& p);

// Say where another KV group keeps a step's tokens: as slot_mapping of the maps, but in that group's blocks. Rows after
// the requests' own get -1, as those that the first group does not keep. Nothing is written on an error.
struct GroupSlotsParams {
  int32_t num_requests;    // R
  int32_t num_tokens;      // T
  int32_t num_table_rows;  // S
  int32_t max_blocks;      // columns of block_tables
  int32_t block_size;
  const int64_t* first_slots;      // [T] slots in the first group, -1 = the token is in no group
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R]
  const int32_t* table_rows;       // [R]
  const int32_t* block_tables;     // [S, max_blocks] padded with -1
  int64_t* slot_mapping;           // [T]
};
Error GroupSlots(const GroupSlotsParams& p);

// Make every row of a step a request of its own, of the same length: in attention a request's rows then see each other,
// whichever comes first. Rows after the requests' own get requests without a row.
struct RowRequestsParams {
  int32_t num_requests;            // R
  int32_t num_rows;                // T, at least query_start_loc[R]
  const int32_t* table_rows;       // [R]
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R]
  int32_t* row_table_rows;         // [T] of the row's request, 0 after the last one
  int32_t* row_starts;             // [T + 1] offsets
  int32_t* row_lens;               // [T] of the row's request, 0 after the last one
};
Error RowRequests(const RowRequestsParams& p);

// Append every request's output to its committed tokens, and count it where a penalty wants that. Then say how many
// drafts it may get: as many as were planned, but so few that max_total leaves room for one token after them. A request
// without output gets none, as its prompt is unfinished or it has failed.
struct AppendTokensParams {
  int32_t num_requests;           // R
  int32_t num_table_rows;         // S
  int32_t max_tokens_per_row;     // columns of token_table
  int32_t num_count_rows;         // rows of token_counts
  int32_t vocab_size;             // V
  const int32_t* table_rows;      // [R] none twice
  const int32_t* token_ids;       // [O]
  const int32_t* cu_num_output;   // [R + 1]
  const int32_t* planned_drafts;  // [R]
  struct Table {
    int32_t* tokens;            // [S, max_tokens_per_row]
    int32_t* num_tokens;        // [S] committed tokens
    const int32_t* max_total;   // [S] tokens after which a request ends
    const int32_t* count_rows;  // [S] row of token_counts, -1 = not counted
    int32_t* token_counts;      // [num_count_rows, V]
  } table;
  int32_t* num_committed;  // [R] num_tokens of each request now
  int32_t* max_draft_len;  // [R]
};
Error AppendTokens(const AppendTokensParams& p);

// Say what the target model ran of each request, for those that draft from its hidden rows; after AppendTokens.
struct TargetStepParams {
  int32_t num_requests;        // R
  int32_t num_table_rows;      // S
  int32_t max_tokens_per_row;  // columns of token_table
  int32_t block_size;
  const int32_t* table_rows;     // [R]
  const int32_t* num_computed;   // [R] tokens in the KV cache before the step
  const int32_t* num_new;        // [R] tokens that were run
  const int32_t* cu_num_logits;  // [R + 1]
  const int32_t* cu_num_output;  // [R + 1]
  const int32_t* num_committed;  // [R]
  const int32_t* num_blocks;     // [S] of each request
  int32_t* num_valid;            // [R] tokens before the first whose hidden row is not certain; see TargetStep
  int32_t* num_kv_slots;         // [R] that its blocks hold, at most max_tokens_per_row
};
Error TargetStep(const TargetStepParams& p);

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
