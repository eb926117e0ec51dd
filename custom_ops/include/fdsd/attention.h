#pragma once
#include "fdsd/kv_cache.h"

namespace fdsd {

// Split a fused qkv row into heads, apply optional RMS norm and rotary embedding to q and k, write k and v to the
// cache.
struct RopeStoreKvParams {
  KvCache cache;         // written in place
  int32_t num_tokens;    // T
  int32_t num_heads;     // Hq
  int32_t rotary_dim;    // even, <= head_dim; the rest of a head passes unchanged
  int32_t max_position;  // rows of cos_sin
  int32_t interleaved;   // 1: pairs (2i, 2i+1) as in ERNIE and GLM; 0: pairs (i, i + rotary_dim / 2) as in NeoX
  float norm_eps;
  const void* qkv;              // [T, (Hq + 2 * Hkv) * D], cache.dtype
  const int32_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T], block_id * block_size + offset; -1 = do not write
  const float* cos_sin;         // [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  const float* q_scale;         // [max_position], q is multiplied by its position's, may be nullptr
  const float* q_norm;          // [D], may be nullptr
  const float* k_norm;          // [D], may be nullptr
  void* q;                      // [T, Hq * D]
};
Error RopeStoreKv(const RopeStoreKvParams& p);

// Turn the last elements of query heads and of latent vectors by their positions, and write the latter to the cache.
struct RopeStoreLatentParams {
  KvCache cache;                // without v; written in place
  int32_t num_tokens;           // T
  int32_t num_heads;            // Hq
  int32_t rotary_dim;           // even, <= head_dim; the rest of a head passes unchanged
  int32_t max_position;         // rows of cos_sin
  int32_t interleaved;          // see RopeStoreKvParams
  const void* heads;            // [T, Hq * D], cache.dtype
  const void* latents;          // [T, D], cache.dtype
  const int32_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T], block_id * block_size + offset; -1 = do not write
  const float* cos_sin;         // [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  void* q;                      // [T, Hq * D]
};
Error RopeStoreLatent(const RopeStoreLatentParams& p);

// Query vectors (query rows times query heads of a KV head) that a request may have to be in a group of SharedPrefixes:
// one with more uses every key often by itself.
constexpr int32_t kMaxSharedVectors = 64;

// Groups of requests that begin with the same blocks: what they share is a number of whole partitions of 256 keys, all
// before the new tokens of each. A request is in one group at most.
struct SharedPrefixes {
  int32_t* group_rows;         // [R, 64], as one line: rows of q, a group's requests one by one, then -1
  int32_t* group_starts;       // [R + 1], where each group's rows begin there; groups after the last have none
  int32_t* group_leaders;      // [R], a request of each group, whose blocks are read; -1 after the last
  int32_t* group_places;       // [R], where each request's rows begin in group_rows, -1: it is in no group
  int32_t* shared_partitions;  // [R], how many each request shares, 0: it is in no group
};

// Find them, where several layers read the same blocks: reading a prefix once for a group saves the most.
struct FindSharedPrefixesParams {
  int32_t num_requests;            // R
  int32_t num_table_rows;          // rows of block_tables
  int32_t max_blocks;              // columns of block_tables
  int32_t block_size;              // tokens per block
  int32_t group_size;              // query heads per KV head
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R], length including the new tokens
  const int32_t* table_rows;       // [R], each request's row of block_tables
  const int32_t* block_tables;     // [num_table_rows, max_blocks], padded with -1
  SharedPrefixes prefixes;         // written
};
Error FindSharedPrefixes(const FindSharedPrefixesParams& p);

// New tokens of a tree at most: bits of a mask.
constexpr int32_t kMaxTreeRows = 64;

// Causal attention of every query row of every request over its paged KV cache; the new tokens' KV is already stored.
// KV is read once per group of heads for all query rows of a request. Partitions that a group of requests shares are
// read once for all of them. Scores are split at fixed absolute positions and the partial results merged in order, so a
// row does not depend on what else is in the call. Sums are in float32. Over a bfloat16 cache the softmax weights are
// rounded to bfloat16 before they meet the values, which leaves a row within 0.5 % of its exact length. A row at
// position p sees the keys first_key..p, with a window the last ones of them, and its own key also where p < first_key.
// No block before the windows of a request's rows is read. Requests may have no rows: then only
// their offsets are read. On a GPU, rows after query_start_loc[R] belong to no request, and their rows of y stay as
// they are.
//
// A request's new tokens follow one another, or are a tree of drafts: then bits of tree_mask say which new tokens
// before it a row sees. Its bits are those of a request whose new tokens are the ones it sees and the row itself, and
// no others: its position counts those alone. Where the last row sees all of them, all rows do. Requests of more than
// kMaxTreeRows new tokens are no trees, whatever their bits.
struct CascadeAppendAttentionParams {
  KvCache cache;           // read only
  int32_t num_requests;    // R
  int32_t num_tokens;      // T
  int32_t num_heads;       // Hq, a multiple of Hkv
  int32_t num_table_rows;  // rows of block_tables
  int32_t max_blocks;      // columns of block_tables
  struct Scores {
    float scale;
    float softcap;      // c: scores become c * tanh(score / c); 0: they stay
    int32_t first_key;  // 0..63; keys before it hold nothing defined
    int32_t window;     // a row sees so many keys at most, its own included; 0: all. Then no prefixes
  } scores;
  const void* q;                   // [T, Hq * D], cache.dtype
  const float* sinks;              // [Hq], a score that each head's softmax counts besides the keys'; may be nullptr
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R], length including the new tokens
  const int32_t* table_rows;       // [R], each request's row of block_tables
  const int32_t* block_tables;     // [num_table_rows, max_blocks], padded with -1
  SharedPrefixes prefixes;         // of these rows, as found; all nullptr: nothing is shared
  const int64_t* tree_mask;        // [T], bit j of row i < 64: whether it sees row j < i; nullptr: all do
  void* y;                         // [T, Hq * D]
};
Error CascadeAppendAttention(const CascadeAppendAttentionParams& p);

// The step's tokens that verified trees of drafts keep: the o-th output of request r came from row output_rows[o] of
// logits, and belongs where its row o of logits is. Outputs of a chain are where they belong. Rows of logits are those
// of the step's tokens logits_indices.
struct VerifiedPaths {
  int32_t num_requests;           // R
  int32_t num_tokens;             // T
  int32_t num_logits;             // L
  const int32_t* cu_num_logits;   // [R + 1]
  const int32_t* cu_num_output;   // [R + 1]
  const int32_t* output_rows;     // [cu_num_output[R]] rising within a request
  const int32_t* logits_indices;  // [L] rising
};

// Move k and v of the kept tokens to where those of a chain would be, bit by bit. Nothing is written on an error.
struct CompactKvParams {
  KvCache cache;  // written; its dtype is not read
  VerifiedPaths paths;
  const int64_t* slot_mapping;  // [T] slot of each of the step's tokens, >= 0 of those with logits
};
Error CompactKv(const CompactKvParams& p);

// The same for rows of the step's tokens, of any element type.
struct CompactRowsParams {
  VerifiedPaths paths;
  int64_t row_bytes;
  void* rows;  // [T, row_bytes], written
};
Error CompactRows(const CompactRowsParams& p);

}  // namespace fdsd
