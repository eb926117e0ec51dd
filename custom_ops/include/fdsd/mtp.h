#pragma once
// What runs before and after a draft layer (multi-token prediction). The row of a draft layer at KV slot q combines the
// token at position q with the hidden row of position q - 1 and guesses the token at q + 1. A whole draft model counts
// as one layer whose hidden rows have no bytes.
#include "fdsd/status.h"

namespace fdsd {

// Plan the passes of a step: which KV slots of the draft layers they fill, and how many drafts each request may get.
// Layer 0 of a request fills the slots from its next_slot on, as far as each has a token, the hidden row before it and
// a block. It does so if the request drafts now or these slots cannot wait. They cannot wait while the prompt goes on,
// as more hidden rows are computed than kept, or when the newest block is full. A later layer l that makes a draft
// itself also fills the slots of the l drafts before it. A request whose every token has a slot may draft, as far as
// blocks, positions, num_steps and max_draft_len allow.
//
// Layers that read hidden rows begin at slot 1. Those that read none begin at slot 0, and their slots can always wait.
// A step fills at most max_filled slots in layer 0: the requests' in order, and one that gets fewer than it needs does
// not draft. Layers without KV need no slots but a request's num_newest last ones: earlier ones are left out.
struct MtpPlanParams {
  int32_t num_requests;    // R
  int32_t max_requests;    // columns of ends, at least R
  int32_t num_table_rows;  // S
  int32_t num_layers;
  int32_t num_drafts;    // room in draft_token_ids
  int32_t num_counts;    // more than num_steps, and than num_layers
  int32_t num_steps;     // most drafts of a request
  int32_t max_position;  // positions are below it
  int32_t block_size;
  int32_t max_filled;    // most slots of layer 0
  int32_t num_newest;    // most slots of layer 0 that a request needs
  int32_t num_more;      // slots that drafts need after the last one that makes a draft when each makes the next
  int32_t reads_hidden;  // whether the KV of the layers follows from hidden rows: 0 or 1
  struct Step {
    const int32_t* table_rows;     // [R]
    const int32_t* num_committed;  // [R] tokens
    const int32_t* max_draft_len;  // [R]
    const int32_t* num_computed;   // [R] tokens that the target had run before this step
    const int32_t* num_valid;      // [R] tokens whose hidden rows are certain, at most num_computed = none of this step
    const int32_t* num_kv_slots;   // [R] that the request's blocks hold
  } step;
  struct Kept {
    const int32_t* next_slot;  // [S] first slot that is not filled; -1 = not drafted for
    const int32_t* num_begun;  // [S] tokens that there were when drafting for the request began
  } kept;
  struct Output {
    int32_t* begin;            // [R] >= reads_hidden
    int32_t* ends;             // [num_layers, max_requests], begin where nothing is filled
    int32_t* cu_num_draft;     // [R + 1]
    int32_t* num_wanted;       // [R], drafts of each request
    int32_t* draft_start_loc;  // [R + 1], requests that get a draft from the last layer
    int32_t* draft_token_ids;  // [cu_num_draft[R]] = -1
    int32_t* num_filling;      // [1] requests that fill a slot
    int32_t* num_tokens;       // [num_layers] = sum(ends - begin)
    int32_t* num_drafting;     // [num_counts] requests that may get more than i drafts
  } out;
};
Error MtpPlan(const MtpPlanParams& p);

// Take what the passes of a step have made: note which slots are filled, and close the gaps of drafts that were not
// made. A request's drafts end before its first -1.
struct MtpCollectParams {
  int32_t num_requests;       // R
  int32_t num_drafts;         // room for drafts, at least cu_num_draft[R]
  int32_t num_table_rows;     // S
  const int32_t* table_rows;  // [R]
  const int32_t* begin;       // [R]
  const int32_t* end;         // [R]
  int32_t* next_slot;         // [S] becomes `end` where that is after `begin`
  int32_t* cu_num_draft;      // [R + 1]
  int32_t* draft_token_ids;   // [cu_num_draft[R]]
  float* draft_prob;          // [cu_num_draft[R]]
  int32_t* kept;              // [num_drafts], written: where each draft that is left was
};
Error MtpCollect(const MtpCollectParams& p);

// Store the drafts of a step in each request's row of made_drafts, where the next step finds them, and note which slots
// are filled. A draft that was not made becomes token 0, as does every draft that there is none for: a guess may be any
// token.
struct MtpHoldParams {
  int32_t num_requests;            // R
  int32_t num_drafts;              // room for drafts, at least cu_num_draft[R]
  int32_t num_table_rows;          // S
  int32_t max_made;                // columns of made_drafts, at least the drafts of a request
  const int32_t* table_rows;       // [R]
  const int32_t* begin;            // [R]
  const int32_t* end;              // [R]
  const int32_t* cu_num_draft;     // [R + 1]
  const int32_t* draft_token_ids;  // [cu_num_draft[R]]
  int32_t* next_slot;              // [S] becomes `end` where that is after `begin`
  int32_t* made_drafts;            // [S, max_made]
};
Error MtpHold(const MtpHoldParams& p);

// Prepare one pass of draft layer source + 1, in which request r computes the slots [begin[r], end[r]): the tokens, the
// maps for attention, and the hidden rows they are combined with. The hidden row of position p is
//   zeros                                             where p < source: that layer has no output there,
//   hidden[cu_hidden[r] + p - hidden_begin[r]]        where p >= hidden_begin[r],
//   block_hidden[the block that ends with p]          where p is the last position of a block,
//   request_hidden[table_rows[r] * n + p % n]         otherwise, with n = num_kept, as KeepHidden left them.
// A layer that makes all drafts of a request in one pass has a block of further rows after those of a request that
// drafts, at the slots from end on, which know only their place: they run mask_token with the hidden row mask_hidden.
// The request's last rows make its drafts, one each. With token_shift the row at slot q runs the token at q - 1. On a
// GPU num_tokens and num_draft_rows may be larger: rows after the requests' get token 0 at position 0, slot -1 and a
// hidden row of zeros, and draft_rows after theirs are 0.
struct MtpPreprocessParams {
  int32_t num_requests;    // R
  int32_t num_tokens;      // T = sum(end - begin), and the rows of blocks
  int32_t num_draft_rows;  // A = requests with more than `source` drafts; with blocks all drafts
  int32_t source;          // the layer whose output `hidden` is; 0 = the target
  struct Requests {
    int32_t num_drafts;              // room in draft_token_ids, at least cu_num_draft[R]
    const int32_t* table_rows;       // [R]
    const int32_t* begin;            // [R] >= 1, or >= 0 where row_bytes is 0
    const int32_t* end;              // [R]
    const int32_t* hidden_begin;     // [R] position of the request's first row in hidden
    const int32_t* cu_hidden;        // [R + 1] rows of hidden; the first may begin after others
    const int32_t* num_committed;    // [R] committed tokens; a later slot's token is a draft
    const int32_t* cu_num_draft;     // [R + 1], drafts that each request will have
    const int32_t* draft_token_ids;  // [cu_num_draft[R]], the first `source` of each request are known
  } requests;
  struct Blocks {
    int32_t num_table_rows;  // rows of token_table and block_table
    int32_t max_blocks;      // columns of block_table
    int32_t block_size;
    const int32_t* block_table;  // [num_table_rows, max_blocks]
  } blocks;
  struct Tokens {
    int32_t max_tokens_per_row;  // columns of token_table
    const int32_t* token_table;  // [num_table_rows, max_tokens_per_row]
  } tokens;
  struct HiddenRows {            // of the layer `source`
    int32_t num_hidden;          // rows of hidden
    int32_t num_blocks;          // rows of block_hidden; 0 = only those of `hidden` are read
    int32_t num_kept;            // rows that are kept of each request
    int64_t row_bytes;           // of a hidden row
    const void* hidden;          // [num_hidden, row_bytes]
    const void* block_hidden;    // [num_blocks, row_bytes]
    const void* request_hidden;  // [num_table_rows * num_kept, row_bytes]
  } rows;
  struct DraftBlock {
    int32_t mask_token;       // -1 = there are no blocks
    int32_t more_rows;        // rows of a block besides one for each draft, at least -1
    int32_t token_shift;      // 0 or 1
    const void* mask_hidden;  // [row_bytes]; null where row_bytes is 0
  } draft_block;
  struct Output {
    int32_t* input_ids;        // [T]
    int32_t* positions;        // [T]
    int64_t* slot_mapping;     // [T]
    int32_t* query_start_loc;  // [R + 1]
    int32_t* seq_lens;         // [R] = end, and the rows of a block
    int32_t* draft_rows;       // [A] the last row of each request that drafts; with blocks as many as it has drafts
    void* hidden;              // [T, row_bytes]
  } out;
};
Error MtpPreprocess(const MtpPreprocessParams& p);

// Write the newest hidden rows of every request to the hidden state buffers, for passes of draft layers in later steps.
// Request r has rows of the positions [seq_lens[r] - n, seq_lens[r]), n of them. The last num_kept go to
// request_hidden, position p to row table_rows[r] * num_kept + p % num_kept. Those that end a block go to the block's
// row of block_hidden. A position whose token was a rejected draft is computed again, and its row is replaced then.
struct KeepHiddenParams {
  int32_t num_requests;    // R
  int32_t num_tokens;      // T
  int32_t num_table_rows;  // rows of block_table
  int32_t max_blocks;      // columns of block_table
  int32_t num_blocks;      // rows of block_hidden
  int32_t block_size;
  int32_t num_kept;                // of each request, at least 1
  int64_t row_bytes;               // of a hidden row
  const int32_t* table_rows;       // [R]
  const int32_t* query_start_loc;  // [R + 1], row r owns hidden rows [q[r], q[r + 1])
  const int32_t* seq_lens;         // [R]
  const int32_t* block_table;      // [num_table_rows, max_blocks]
  const void* hidden;              // [T, row_bytes]
  void* block_hidden;              // [num_blocks, row_bytes], written
  void* request_hidden;            // [num_table_rows * num_kept, row_bytes], written
};
Error KeepHidden(const KeepHiddenParams& p);

// Take the most likely token of every drafting row as draft `step` of its request (ties: the lowest id; -1 for a row
// without a largest finite logit). Then prepare the pass that continues after it: one row for every request that gets
// more drafts. The row after a -1 runs token 0. Where min_survival is not negative, the draft's probability under the
// draft layers is written too, 0 for a -1. A draft that is less probable than min_prob then becomes -1. A request gets
// no more drafts when the product of its drafts' probabilities is below min_survival.
// On a GPU the caller need not know how many requests go on: num_rows and num_next may be bounds. Rows of `logits`
// after the requests' are not read. Rows of the next pass after theirs get token 0 at position 0 and slot -1.
struct MtpPostprocessParams {
  int32_t num_requests;          // R
  int32_t num_rows;              // A = requests with num_wanted > step, in order
  int32_t num_next;              // room for B = requests that go on; those with num_wanted > step + 1 before
  int32_t vocab_size;            // V
  int32_t step;                  // from 0
  int64_t row_bytes;             // of a hidden row
  const int32_t* table_rows;     // [R]
  const int32_t* num_committed;  // [R]
  const int32_t* cu_num_draft;   // [R + 1], room for the drafts of each request
  const float* min_survival;     // [R] negative = no probability is wanted
  const float* logits;           // [A, V]
  const void* hidden;            // [A, row_bytes]
  int32_t* num_wanted;  // [R], drafts that each request gets, at most its room; lowered to step + 1 where it ends
  struct Drafts {
    int32_t num_drafts;        // room, at least cu_num_draft[R]
    float min_prob;            // 0 = no draft is too improbable
    int32_t* draft_token_ids;  // [cu_num_draft[R]], written
    float* draft_prob;         // [cu_num_draft[R]], written where it is wanted
    const int32_t* token_map;  // [V], the token of each column of `logits`; null = its number
  } drafts;
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
    int32_t* num_continued;    // [1] = B
  } out;
};
Error MtpPostprocess(const MtpPostprocessParams& p);

}  // namespace fdsd
