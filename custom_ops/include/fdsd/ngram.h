#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Drafts from a request's own text, looked up anew: nothing is kept between steps. Request r's text is the committed
// tokens of its row of the table, then its prefix. Its longest end of min_n .. max_n tokens decides that also occurs
// before, within the committed tokens. What followed its latest occurrence is drafted, at most max_factor tokens for
// each that agreed. Where that runs into the end of the text it goes on with what was just drafted. These are the
// drafts of NgramIndex (fdsd/draft.h) without follows_copies.
struct NgramMatchParams {
  int32_t num_requests;  // R
  int32_t min_n;         // >= 1
  int32_t max_n;         // >= min_n
  double max_factor;     // > 0
  struct Texts {
    int32_t num_table_rows;           // rows of token_table
    int32_t max_tokens_per_row;       // columns of token_table
    int32_t num_prefix_tokens;        // of all requests
    const int32_t* token_table;       // [num_table_rows, max_tokens_per_row]
    const int32_t* table_rows;        // [R]
    const int32_t* num_tokens;        // [R] committed tokens
    const int32_t* prefix_token_ids;  // [num_prefix_tokens]
    const int32_t* cu_num_prefix;     // [R + 1], nullptr = no request has one
  } texts;
  struct Drafts {
    int32_t max_num_drafts;        // room, at least the sum of max_draft_len
    const int32_t* max_draft_len;  // [R] >= 0, the prefix not counted
    int32_t* draft_token_ids;      // [max_num_drafts], the first cu_num_draft[R] are written
    int32_t* cu_num_draft;         // [R + 1]
    int32_t* num_matched;          // [R] tokens of the end that agreed, 0 = none was found
  } drafts;
};

}  // namespace fdsd
