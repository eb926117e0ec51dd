#pragma once
#include "fdsd/linear.h"

namespace fdsd {

// Groups of experts at most: a GPU's warp has a lane for each.
constexpr int32_t kMaxExpertGroups = 32;

// Mixture of experts: a router, top-k experts per token, each a SwiGLU feed-forward network. Every rank routes
// over all experts and runs those it has. Their sum is cut into slices of experts as `Linear` cuts one over inputs.
struct MoeFfnParams {
  int32_t num_tokens;         // T
  int32_t hidden_size;        // H
  int32_t intermediate_size;  // I of one expert
  int32_t num_experts;        // E
  int32_t first_expert;       // of those that are here
  int32_t num_local_experts;  // L
  int32_t num_slices;         // of the local experts: 1, 2 or 4
  DType dtype;                // of x and shared
  DType y_dtype;
  struct Router {
    const float* router_weight;   // [E, H]
    const float* router_bias;     // [E] added to the products; may be nullptr
    const float* selection_bias;  // [E] added to the probabilities for choosing only; may be nullptr
    int32_t sigmoid;              // 1: a probability is the sigmoid of its logit; 0: the softmax over all experts
    int32_t num_groups;           // of consecutive experts, 1..kMaxExpertGroups
    int32_t num_chosen_groups;    // those with the best sums of their two best scores; others are not chosen from
    int32_t top_k;
    int32_t normalize;  // 1: divide the chosen weights by max(their sum, norm_min)
    float norm_min;
    float scale;  // of the weights
  } router;
  struct Experts {
    LinearFormat gate_up_format;
    LinearFormat down_format;
    const void* gate_up;        // [L] packed [2 * I, H] matrices, one after another
    const void* down;           // [L] packed [H, I] matrices, one after another
    const float* gate_up_bias;  // [L, 2 * I], may be nullptr
    const float* down_bias;     // [L, H], may be nullptr
    float gate_limit;  // c: silu(gate) * up becomes g sigmoid(1.702 g) * (u + 1), g = min(gate, c), u = up in -c..c; 0:
                       // not
  } experts;
  const void* x;       // [T, H]
  const void* shared;  // [T, H] output of the shared experts, added to the sum; may be nullptr
  void* y;             // [T, H]
};
Error MoeFfn(const MoeFfnParams& p);

}  // namespace fdsd
