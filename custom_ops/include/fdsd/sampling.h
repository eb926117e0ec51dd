#pragma once
#include "fdsd/status.h"

namespace fdsd {

// Penalties, bias and forbidden tokens; see SamplingArrays in fastdeploy_sd/types.py. Row j of a request counts the
// drafts before it as if they were output, so a drafted position gets the logits that plain decoding would give it.
struct ProcessLogitsParams {
  int32_t num_rows;                // L
  int32_t num_requests;            // R
  int32_t vocab_size;              // V
  int32_t num_slots;               // rows of token_counts
  const float* logits;             // [L, V]
  const int32_t* cu_num_logits;    // [R + 1] rows of each request
  const int32_t* draft_token_ids;  // [D]
  const int32_t* cu_num_draft;     // [R + 1]
  struct Penalties {
    const float* repetition;      // [R], 1 = off
    const float* presence;        // [R], 0 = off
    const float* frequency;       // [R], 0 = off
    const int32_t* slot;          // [R] row of token_counts, -1 = none
    const int32_t* token_counts;  // [num_slots, V]: bits 0..29 count in the output, bit 30: in the prompt
  } penalties;
  struct Bias {
    const int32_t* cu;         // [R + 1]
    const int32_t* token_ids;  // [cu[R]]
    const float* values;       // [cu[R]]
  } bias;
  struct Mask {
    const int32_t* cu;         // [L + 1]
    const int32_t* token_ids;  // [cu[L]] forbidden: the logit becomes -inf
  } mask;
  float* y;  // [L, V]
};
Error ProcessLogits(const ProcessLogitsParams& p);

// Draw one token per row: temperature -> min_p -> top_k -> top_p -> inverse CDF at u = philox(seed, position).
// Temperature 0 takes the highest logit. Ties go to the lowest token id. A row with NaN or +inf, or without any finite
// logit, yields -1.
struct SampleParams {
  int32_t num_rows;                    // L
  int32_t num_requests;                // R
  int32_t vocab_size;                  // V
  const float* logits;                 // [L, V]
  const int32_t* batch_id_per_output;  // [L] request of each row
  const int32_t* positions;            // [L] absolute position of the token to draw
  const float* temperature;            // [R]
  const int32_t* top_k;                // [R], 0 = off
  const float* top_p;                  // [R], 1 = off
  const float* min_p;                  // [R], 0 = off
  const uint64_t* seed;                // [R]
  int32_t* token_ids;                  // [L]
};
Error Sample(const SampleParams& p);

// Uniform double in [0, 1) that sampling uses for (seed, position): Philox4x32-10, key = seed, counter = position.
double PhiloxUniform(uint64_t seed, uint32_t position);

// log softmax of the chosen token and of the num_top best ones; rank = 1 + tokens with a higher logit (or an equal one
// and a lower id).
struct TokenLogprobsParams {
  int32_t num_rows;    // L
  int32_t vocab_size;  // V
  int32_t num_top;
  const float* logits;       // [L, V]
  const int32_t* token_ids;  // [L]
  float* logprobs;           // [L]
  int32_t* ranks;            // [L]
  int32_t* top_token_ids;    // [L, num_top], best first
  float* top_logprobs;       // [L, num_top]
};
Error TokenLogprobs(const TokenLogprobsParams& p);

// Keep each request's longest draft prefix that equals the sampled tokens, then the sampled token after it.
struct VerifyDraftTokensParams {
  int32_t num_requests;              // R
  const int32_t* sampled_token_ids;  // [L]
  const int32_t* cu_num_logits;      // [R + 1]: num_draft + 1 rows, or 0 while the prompt is unfinished
  const int32_t* draft_token_ids;    // [D]
  const int32_t* cu_num_draft;       // [R + 1]
  int32_t* token_ids;                // [L] outputs, compacted
  int32_t* cu_num_output;            // [R + 1]
  int32_t* num_accepted;             // [R]
};
Error VerifyDraftTokens(const VerifyDraftTokensParams& p);

}  // namespace fdsd
