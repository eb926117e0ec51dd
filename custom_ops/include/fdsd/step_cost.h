#pragma once
// What the calls of the step cost look like: what the next step takes, as was measured and as steps say since.
#include "fdsd/policy.h"
#include "fdsd/status.h"

namespace fdsd {

class StepCost;

// What was measured, as CostModel works it out. What is known by numbers of requests is interpolated in between, over
// factors of two, and ends with the first and the last.
struct StepCostCreateParams {
  int32_t num_times;            // N >= 2; steps have fewer rows
  const double* curve;          // [N] > 0, rising: ms of one request's step by its rows, at the shortest context
  int32_t num_shapes;           // C >= 1
  const int32_t* shape_counts;  // [C] numbers of requests, rising from 1
  const double* shapes;         // [C, N] > 0: times of so many requests' steps over `curve`
  int64_t short_context;        // >= 0, tokens of a request that `curve` has in it
  int32_t num_slopes;           // >= 0; 0 = contexts take nothing
  const int32_t* slope_counts;  // [num_slopes] numbers of requests, rising from at least 1
  const double* slopes;         // [num_slopes] >= 0: ms of a token of context more
  int32_t num_shares;           // >= 0; 0 = drafts read no context
  const int32_t* share_counts;  // [num_shares] numbers of requests, rising from at least 1
  const double* shares;         // [num_shares] 0 .. 1: what a draft takes to read its context over its request's token
  StepCost** cost;              // [1], to be destroyed with fdsd_step_cost_destroy
};

// A step, and what is to be known of it: each call writes its own part, and the speed. See StepCost.
struct StepCostParams {
  StepCost* cost;
  int32_t num_rows;
  int32_t num_requests;
  int64_t num_kv_tokens;     // in the contexts of all of them
  double ms;                 // `observe`: what the step took, finite
  PolicyTimesParams* times;  // [1] `times` writes it
  double* outcome;           // [2] ms that `expected` tells, and the speed
};

}  // namespace fdsd
