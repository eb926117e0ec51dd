#pragma once
#include "fdsd/linear.h"

namespace fdsd {

// Mixture of experts: softmax router, top-k experts per token, each a SwiGLU feed-forward network.
struct MoeFfnParams {
  int32_t num_tokens;         // T
  int32_t hidden_size;        // H
  int32_t intermediate_size;  // I of one expert
  int32_t num_experts;        // E
  int32_t top_k;
  int32_t normalize;  // 1: divide the chosen weights by max(their sum, norm_min)
  float norm_min;
  DType dtype;                  // of x and y
  LinearFormat format;          // of the experts
  const void* x;                // [T, H]
  const float* router_weight;   // [E, H]
  const float* selection_bias;  // [E] added to the probabilities for choosing only; may be nullptr
  const void* gate_up;          // [E] packed [2 * I, H] matrices, one after another
  const void* down;             // [E] packed [H, I] matrices, one after another
  const void* shared;           // [T, H] output of the shared experts, added to the sum; may be nullptr
  void* y;                      // [T, H]
};
Error MoeFfn(const MoeFfnParams& p);

}  // namespace fdsd
