#pragma once
// Which experts read which tokens. Knows the router's weights and nothing of the experts'.
#include "fdsd/moe.h"
#include "scratch_arrays.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

struct RouterInput {
  int32_t num_tokens;   // T
  int32_t hidden_size;  // H
  int32_t num_experts;  // E
  DType dtype;
  MoeFfnParams::Router router;
  const void* x;  // [T, H]
};

// Each token's best top_k experts, the best first, and their weights; `memory` has RouterBytes(input) bytes, 64-byte
// aligned.
void ChooseExperts(const RouterInput& input, int32_t* expert_ids, float* weights, char* memory);
int64_t RouterBytes(const RouterInput& input);

// A pair is a (token, chosen expert); pairs are numbered by expert, then by token.
struct MoePairs {
  int32_t* first;        // [E + 1] the pairs of expert e are [first[e], first[e + 1])
  int32_t* tokens;       // [T * top_k] by pair
  float* weights;        // [T * top_k] by pair
  int32_t* token_pairs;  // [T, top_k] each token's pairs, ascending: in order of expert ids

  MoePairs(const RouterInput& input, Arena* arena);
};

// Fills `pairs`; `memory` as ChooseExperts'.
void RouteTokens(const RouterInput& input, const MoePairs& pairs, char* memory);

}  // namespace FDSD_ISA
}  // namespace fdsd
