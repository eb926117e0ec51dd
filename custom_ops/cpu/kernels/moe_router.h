#pragma once
// Which experts read which tokens. Knows the router's weights and nothing of the experts'.
#include "fdsd/moe.h"
#include "scratch_arrays.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// A pair is a (token, chosen expert); pairs are numbered by expert, then by token.
struct MoePairs {
  int32_t* first;        // [E + 1] the pairs of expert e are [first[e], first[e + 1])
  int32_t* tokens;       // [T * top_k] by pair
  float* weights;        // [T * top_k] by pair
  int32_t* token_pairs;  // [T, top_k] each token's pairs, ascending: in order of expert ids

  MoePairs(const MoeFfnParams& p, Arena* arena);
};

// Fills `pairs`; `memory` has MoeRouterBytes(p) bytes, 64-byte aligned.
void RouteTokens(const MoeFfnParams& p, const MoePairs& pairs, char* memory);
int64_t MoeRouterBytes(const MoeFfnParams& p);

}  // namespace FDSD_ISA
}  // namespace fdsd
