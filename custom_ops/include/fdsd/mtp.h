#pragma once
// What runs before and after a draft layer (multi-token prediction). The row of a draft layer at KV slot q combines the
// token at position q with the hidden row of position q - 1 and guesses the token at q + 1.
#include "fdsd/status.h"

namespace fdsd {

// Prepare one pass of draft layer source + 1, in which request r computes the slots [begin[r], end[r]): the tokens, the
// maps for attention, and the hidden rows they are combined with. The hidden row of position p is
//   zeros                                             where p < source: that layer has no output there,
//   hidden[cu_hidden[r] + p - hidden_begin[r]]        where p >= hidden_begin[r],
//   block_hidden[the block that ends with p]          where p is the last position of a block,
//   request_hidden[table_rows[r]]                     otherwise; the last two only for p = begin[r] - 1.
// Afterwards block_hidden and request_hidden keep, of the certain positions [hidden_begin[r], hidden_end[r]), the rows
// that end a block and the last one.
struct MtpPreprocessParams {
  int32_t num_requests;    // R
  int32_t num_tokens;      // T = sum(end - begin)
  int32_t num_draft_rows;  // A = requests with more than `source` drafts
  int32_t source;          // the layer whose output `hidden` is; 0 = the target
  struct Requests {
    int32_t num_drafts;              // room in draft_token_ids, at least cu_num_draft[R]
    const int32_t* table_rows;       // [R]
    const int32_t* begin;            // [R] >= 1
    const int32_t* end;              // [R]
    const int32_t* hidden_begin;     // [R] position of the request's first row in hidden
    const int32_t* hidden_end;       // [R]
    const int32_t* cu_hidden;        // [R + 1] rows of hidden; the first may begin behind others
    const int32_t* num_committed;    // [R] committed tokens; a later slot's token is a draft
    const int32_t* cu_num_draft;     // [R + 1], drafts that each request will have
    const int32_t* draft_token_ids;  // [cu_num_draft[R]], the first `source` of each request are known
  } requests;
  struct Blocks {
    int32_t num_table_rows;  // rows of token_table, block_table and request_hidden
    int32_t max_blocks;      // columns of block_table
    int32_t block_size;
    const int32_t* block_table;  // [num_table_rows, max_blocks]
  } blocks;
  struct Tokens {
    int32_t max_tokens_per_row;  // columns of token_table
    const int32_t* token_table;  // [num_table_rows, max_tokens_per_row]
  } tokens;
  struct HiddenRows {      // of the layer `source`
    int32_t num_hidden;    // rows of hidden
    int32_t num_blocks;    // rows of block_hidden
    int64_t row_bytes;     // of a hidden row
    const void* hidden;    // [num_hidden, row_bytes]
    void* block_hidden;    // [num_blocks, row_bytes], written
    void* request_hidden;  // [num_table_rows, row_bytes], written
  } rows;
  struct Output {
    int32_t* input_ids;        // [T]
    int32_t* positions;        // [T]
    int64_t* slot_mapping;     // [T]
    int32_t* query_start_loc;  // [R + 1]
    int32_t* seq_lens;         // [R] = end
    int32_t* draft_rows;       // [A] the last row of each request that drafts
    void* hidden;              // [T, row_bytes]
  } out;
};
Error MtpPreprocess(const MtpPreprocessParams& p);

// Take the most likely token of every drafting row as draft `step` of its request (ties: the lowest id; -1 for a row
// without a largest finite logit), and prepare the pass that continues after it: one row for every request that gets
// more drafts. The row after a -1 runs token 0.
struct MtpPostprocessParams {
  int32_t num_requests;          // R
  int32_t num_rows;              // A = requests with more than `step` drafts, in order
  int32_t num_next;              // B = requests with more than step + 1
  int32_t vocab_size;            // V
  int32_t step;                  // from 0
  int32_t num_drafts;            // room in draft_token_ids, at least cu_num_draft[R]
  int64_t row_bytes;             // of a hidden row
  const int32_t* table_rows;     // [R]
  const int32_t* num_committed;  // [R]
  const int32_t* cu_num_draft;   // [R + 1]
  const float* logits;           // [A, V]
  const void* hidden;            // [A, row_bytes]
  int32_t* draft_token_ids;      // [cu_num_draft[R]], written
  struct Blocks {
    int32_t num_table_rows;  // rows of block_table
    int32_t max_blocks;      // columns of block_table
    int32_t block_size;
    const int32_t* block_table;  // [num_table_rows, max_blocks]
  } blocks;
  struct Output {
    int32_t* input_ids;        // [B]
    int32_t* positions;        // [B]
    int64_t* slot_mapping;     // [B]
    int32_t* query_start_loc;  // [R + 1]
    int32_t* seq_lens;         // [R], num_committed + step + 1 where the request has a row, else 0
    void* hidden;              // [B, row_bytes]
  } out;
};
Error MtpPostprocess(const MtpPostprocessParams& p);

}  // namespace fdsd
