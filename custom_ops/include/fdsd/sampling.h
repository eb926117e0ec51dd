#pragma once
#include "fdsd/status.h"

namespace fdsd {

// The logits rows of each request and the drafts they follow. Row j > 0 of a request is that of its draft j - 1, which
// is a guess at the token of the row's parent. A row follows the drafts on its path: its own, its parent's and so on,
// but none of row 0.
struct DraftedRows {
  const int32_t* cu_num_logits;    // [R + 1] rows of each request, at most drafts + 1
  const int32_t* draft_token_ids;  // [D]
  const int32_t* cu_num_draft;     // [R + 1]
  const int32_t* parent_rows;      // [L] counted from the request's first, < j; -1 of row 0; nullptr = the row before
};

// The tokens that grammars allow, per row of logits: bit i % 32 of word i / 32 says whether token i is one of them. The
// logits of the others become -inf.
struct AllowedBits {
  int32_t num_allowed;          // M, rows of allowed_bits
  int32_t num_allowed_words;    // columns of allowed_bits, at least ceil(V / 32)
  const int32_t* allowed_rows;  // [L] row of allowed_bits, -1 = every token is allowed
  const int32_t* allowed_bits;  // [M, num_allowed_words]
};

// The tokens that a grammar allows, penalties, bias and forbidden tokens; see SamplingArrays in
// fastdeploy_sd/types/steps.py. fastdeploy_sd/rules/sampling.py states the same ranges for the code that fills the
// columns. Request r is row table_rows[r] of each column. A row of logits counts the drafts on its path as if they were
// output, so a drafted position gets the logits that plain decoding would give it.
struct LogitsRules {
  int32_t num_table_rows;           // S
  int32_t num_count_rows;           // rows of token_counts
  int32_t max_num_bias;             // columns of the biases
  const int32_t* table_rows;        // [R]
  const float* repetition_penalty;  // [S] in 0.001..1000, 1 = off
  const float* presence_penalty;    // [S] in -2..2, 0 = off
  const float* frequency_penalty;   // [S] in -2..2, 0 = off
  const int32_t* count_rows;        // [S] row of token_counts, -1 = no penalty
  const int32_t* token_counts;      // [num_count_rows, V]: bits 0..29 count in the output, bit 30: in the prompt
  const int32_t* num_bias;          // [S] tokens with a bias
  const int32_t* bias_token_ids;    // [S, max_num_bias]
  const float* bias_values;         // [S, max_num_bias] in -100..100
  const int32_t* cu_mask;           // [L + 1]
  const int32_t* mask_token_ids;    // [cu_mask[L]] forbidden: the logit becomes -inf
  AllowedBits allowed;              // comes before all the others
};

// The rows as their requests' rules leave them: what Sample and TopPCandidates read.
struct ProcessLogitsParams {
  int32_t num_rows;       // L
  int32_t num_processed;  // P
  int32_t num_requests;   // R
  int32_t vocab_size;     // V
  const float* logits;    // [L, V]
  const int32_t* rows;    // [P] those to process, of the L
  DraftedRows drafted;
  LogitsRules rules;
  float* y;  // [P, V]
};
Error ProcessLogits(const ProcessLogitsParams& p);

// Draw one token per row, with the settings in row rules.table_rows[r] of the columns of its request r: the rules ->
// temperature -> min_p -> top_k -> top_p -> inverse CDF at u = philox(seed, position). Temperature 0 takes the highest
// logit. Ties go to the lowest token id. A row with NaN or +inf, or without any finite logit, yields -1. With
// stops_at_wrong_draft, a row whose draft is not the token of its parent yields -2 and is not read.
struct SampleParams {
  int32_t num_rows;                    // L
  int32_t num_requests;                // R
  int32_t vocab_size;                  // V
  int32_t stops_at_wrong_draft;        // 0 = every row is drawn
  const float* logits;                 // [L, V]
  const int32_t* batch_id_per_output;  // [L] request of each row
  const int32_t* positions;            // [L] absolute position of the token to draw
  const float* temperature;            // [S] in 0..1000000, 0 = the highest logit
  const int32_t* top_k;                // [S] >= 0, 0 = off
  const float* top_p;                  // [S] in (0, 1], 1 = off
  const float* min_p;                  // [S] in 0..1, 0 = off
  const uint64_t* seed;                // [S]
  int32_t* token_ids;                  // [L]
  DraftedRows drafted;                 // all nullptr = no row follows a draft
  LogitsRules rules;
};
Error Sample(const SampleParams& p);

// Uniform double in [0, 1) that sampling uses for (seed, position): Philox4x32-10, key = seed, counter = position.
double PhiloxUniform(uint64_t seed, uint32_t position);

// log softmax of tokens, each in a row of logits, and of the num_top best ones there. rank = 1 + the number of tokens
// with a higher logit (or an equal one and a lower id).
struct TokenLogprobsParams {
  int32_t num_rows;    // N
  int32_t num_logits;  // L
  int32_t vocab_size;  // V
  int32_t num_top;
  const float* logits;       // [L, V]
  const int32_t* rows;       // [N] of logits
  const int32_t* token_ids;  // [N]
  float* logprobs;           // [N]
  int32_t* ranks;            // [N]
  int32_t* top_token_ids;    // [N, num_top], best first
  float* top_logprobs;       // [N, num_top]
};
Error TokenLogprobs(const TokenLogprobsParams& p);

// The tokens that the topp strategy takes for plausible, and the token it emits itself, per row. Candidates are the
// max_candidate_len most likely tokens that temperature, min_p and top_k leave (temperature 0 leaves one), best first,
// ties to the lowest id. Usable are all if top_p is 1, else the shortest prefix whose probabilities, as a float sum,
// reach top_p, or none where no prefix does. The token is the first usable one whose running probability reaches
// u * top_p with u = philox(seed, position), else the most likely one.
struct TopPCandidatesParams {
  SampleParams rows;             // token_ids: the token of each row, -1 for a row that Sample refuses; none stops
  int32_t max_candidate_len;     // C
  int32_t* candidate_token_ids;  // [L, C], -1 past the last candidate
  int32_t* candidate_lens;       // [L] how many candidates are usable
};
Error TopPCandidates(const TopPCandidatesParams& p);

enum class AcceptPolicy : int32_t { kNormal = 0, kAcceptAll = 1, kRejectAll = 2 };

// Keep a prefix of each request's drafts, then emit the sampled token of the row after it.
// Without candidates, a draft is verified if it equals the sampled token of its row; with candidates, if it is a usable
// one. Another draft is still kept if it is its row's second candidate and each of the verify_window drafts after it is
// the first candidate of its own row. Then these are kept too. kAcceptAll and kRejectAll verify nothing. A request of
// which a row up to the emitted one has no sampled token (-1) fails: it accepts and emits nothing. Verifying by
// equality gives what plain decoding gives before it fails. If the row after the equal drafts has no token, the last of
// them is not accepted: it is emitted, as the sampled token that it equals. Only a request whose row 0 has no token
// fails. Trees of drafts are verified by equality: after a row comes its first child whose draft is the row's token.
struct VerifyDraftTokensParams {
  int32_t num_requests;  // R
  AcceptPolicy accept_policy;
  int32_t max_candidate_len;           // C, 0 = verify by equality
  int32_t verify_window;               // >= 0; used with candidates
  const int32_t* sampled_token_ids;    // [L]
  const int32_t* cu_num_logits;        // [R + 1]: num_draft + 1 rows, or 0 while the prompt is unfinished
  const int32_t* draft_token_ids;      // [D]
  const int32_t* cu_num_draft;         // [R + 1]
  const int32_t* parent_rows;          // [L] as in DraftedRows; nullptr = chains, as it must be unless by equality
  const int32_t* candidate_token_ids;  // [L, C] or nullptr
  const int32_t* candidate_lens;       // [L] or nullptr
  int32_t* token_ids;                  // [L] outputs, compacted
  int32_t* output_rows;                // [L] the row that each output is the token of
  int32_t* cu_num_output;              // [R + 1]
  int32_t* num_accepted;               // [R]
  int32_t* num_failed;                 // [1] how many requests failed
};
Error VerifyDraftTokens(const VerifyDraftTokensParams& p);

}  // namespace fdsd
