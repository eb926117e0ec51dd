#pragma once
// Layers that keep a state of fixed size per request instead of KV.
#include "fdsd/status.h"

namespace fdsd {

// A gated delta net, from the input projections up to the output projection: short convolution, delta rule, gated norm.
// A request's rows are its first num_replayed draft_rows, which were accepted and are not in its state yet, then those
// of the step. For each row in order and each value head h, which has the key head h * Hk / Hv:
//
//   x = silu(sum_j conv_weight[j] * raw[row - width + 1 + j])     raw: q | k | v, those before the rows from conv_rows
//   q, k = x / sqrt(sum x^2 + 1e-6), q also / sqrt(dk);  v = x
//   beta = sigmoid(b);  g = exp(-exp(a_log) * softplus(a + dt_bias))
//   S = g * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q
//   y = rms_norm(o) * norm_weight * silu(z)                        of the step's rows
//
// A step's first num_certain rows are no drafts. Slot table_rows[r] gets the state after these and the replayed ones;
// the rows after them are stored in draft_rows. A snapshot is the state after snapshot_ends rows, replayed ones
// included, which may be drafts. The bits of a row depend on the rows of its text alone, not on how steps cut them.
// No slot is written twice, nor read by another request than the one that writes it. Nothing is read or written of a
// request without rows in the step but its offsets. Rows of y after the requests' become zeros.
struct GatedDeltaNetParams {
  int32_t num_requests;    // R
  int32_t num_tokens;      // T
  int32_t num_slots;       // slots of state and conv_rows: one for each table row, then snapshots
  int32_t num_table_rows;  // S
  int32_t max_drafts;      // of a table row
  int32_t num_snapshots;   // room in snapshot_ends, at least cu_snapshots[R]
  struct Heads {
    int32_t num_key_heads;    // Hk
    int32_t num_value_heads;  // Hv, a multiple of Hk
    int32_t key_dim;          // dk
    int32_t value_dim;        // dv
  } heads;
  int32_t conv_width;  // 2..8
  DType dtype;
  float eps;
  const void* qkvz;  // [T, 2 * Hk * dk + 2 * Hv * dv], q | k | v | z
  const void* ba;    // [T, 2 * Hv], b | a
  struct Weights {
    const float* conv_weight;  // [width, C], with C = 2 * Hk * dk + Hv * dv
    const float* a_log;        // [Hv]
    const float* dt_bias;      // [Hv]
    const float* norm_weight;  // [dv]
  } weights;
  struct Memory {
    float* state;      // [num_slots, Hv, dk, dv]
    void* conv_rows;   // [num_slots, width - 1, C], the last raw rows of q | k | v; zeros before a text
    void* draft_rows;  // [S, max_drafts, C + 2 * Hv], q | k | v | b | a
  } memory;
  struct States {
    const int32_t* table_rows;    // [R]
    const int32_t* source;        // [R], slot of the state before the rows: the request's own or a snapshot; -1: none
    const int32_t* num_replayed;  // [R]
    const int32_t* num_certain;   // [R]
    const int32_t* query_start_loc;  // [R + 1], request r owns rows [q[r], q[r + 1])
    const int32_t* cu_snapshots;     // [R + 1]
    const int32_t* snapshot_ends;    // [num_snapshots], >= 1, rising within a request
    const int32_t* snapshot_slots;   // [num_snapshots], >= S
  } states;
  void* y;  // [T, Hv * dv]
};
Error GatedDeltaNet(const GatedDeltaNetParams& p);

}  // namespace fdsd
