#pragma once
// What the calls of a drafter that reads tokens only look like, whatever it keeps. For ctypes: plain structs.
#include <cstdint>

namespace fdsd {

template <typename Drafter>
struct DraftSlotsParams {
  Drafter* drafter;
  int32_t count;
  const int32_t* slots;  // [count]
};

// Read what is new in the rows of a step, and draft for them. Row r's text is its committed tokens, then its prefix.
template <typename Drafter>
struct DraftProposeParams {
  Drafter* drafter;
  int32_t num_rows;                 // R
  int32_t num_slots;                // rows of token_table
  int32_t max_tokens_per_row;       // columns of token_table
  int32_t max_num_drafts;           // room in draft_token_ids, at least the sum of max_draft_len
  const int32_t* token_table;       // [num_slots, max_tokens_per_row] committed tokens of each slot
  const int32_t* slots;             // [R] row of token_table, none twice
  const int32_t* num_tokens;        // [R] committed tokens, never fewer than in the slot's last step
  const int32_t* max_draft_len;     // [R] the prefix not counted
  const int32_t* prefix_token_ids;  // [cu_num_prefix[R]], nullptr = nobody has one
  const int32_t* cu_num_prefix;     // [R + 1], nullptr = nobody has one
  int32_t* draft_token_ids;         // [max_num_drafts], the first cu_num_draft[R] are written
  int32_t* cu_num_draft;            // [R + 1]
};

}  // namespace fdsd
