#pragma once
// Experts that ranks share: each rank runs its own for the tokens of all. See cpu/runtime/expert_service.h.
#include "fdsd/call.h"
#include "fdsd/moe.h"

namespace fdsd {

// What the experts of a layer have in common.
struct ExpertShape {
  int32_t hidden_size;        // H
  int32_t intermediate_size;  // I
  DType dtype;                // of x
  LinearFormat gate_up_format;
  LinearFormat down_format;
  float gate_limit;  // see MoeFfnParams
};

// Where one expert's weights are.
struct ExpertWeights {
  const void* gate_up;        // packed [2 * I, H], 64-byte aligned
  const void* down;           // packed [H, I], likewise
  const float* gate_up_bias;  // [2 * I], may be nullptr
  const float* down_bias;     // [H], may be nullptr
};

// y[y_rows[i]] = FFN_e(x[x_rows[i]]) for every pair i of expert e, in float32, not yet weighted: what MoeFfn adds up.
struct RunExpertsParams {
  ExpertShape shape;
  int32_t num_experts;
  int32_t rows_per_expert;       // about, on average: it chooses kernels, all of which give the same bits
  const ExpertWeights* experts;  // [num_experts]
  const int32_t* first_pair;     // [num_experts + 1] the pairs of expert e are first_pair[e] to first_pair[e + 1] - 1
  const int32_t* x_rows;         // [first_pair[num_experts]]
  int64_t x_stride;              // in elements
  const void* x;
  const int32_t* y_rows;  // [first_pair[num_experts]], rising for each expert
  int64_t y_stride;       // in elements
  float* y;
};
Error RunExperts(const RunExpertsParams& p);

// Chooses each token's experts, and gives the tokens of this rank to the ranks that have these. Of T tokens the rank
// has part `part` of `num_parts`, from T * part / num_parts on; others have expert ids -1 and weights 0.
struct DispatchExpertsParams {
  int32_t service;  // handle; 0 = the tokens are given to no rank
  int32_t layer;
  int32_t num_tokens;   // T
  int32_t hidden_size;  // H
  int32_t num_experts;  // E
  int32_t part;
  int32_t num_parts;
  int32_t is_first;  // 1: the first such op of a pass
  DType dtype;       // of x
  MoeFfnParams::Router router;
  const void* x;        // [T, H]
  int32_t* expert_ids;  // [T, top_k], ascending
  float* weights;       // [T, top_k]
};
Error DispatchExperts(const DispatchExpertsParams& p);

// Waits for what dispatch_experts asked for and adds it up as MoeFfn does. Rows of other parts are -0, which changes no
// number that it is added to.
struct CombineExpertsParams {
  int32_t service;
  int32_t layer;
  int32_t num_tokens;
  int32_t hidden_size;
  int32_t top_k;
  int32_t part;
  int32_t num_parts;
  int32_t is_last;     // 1: the last such op of a pass
  int32_t num_slices;  // of all experts: 1, 2 or 4
  DType dtype;         // of x and shared
  DType y_dtype;
  const void* x;              // [T, H] as dispatched
  const int32_t* expert_ids;  // [T, top_k]
  const float* weights;       // [T, top_k]
  const void* shared;         // [T, H], may be nullptr
  void* y;                    // [T, H]
};
Error CombineExperts(const CombineExpertsParams& p);

constexpr int32_t kMaxExpertRanks = 64;

// What all ranks' services have in common. Where layers differ, the greatest of all layers.
struct ExpertServiceShape {
  int32_t num_ranks;   // R, 1..kMaxExpertRanks
  int32_t num_layers;  // L
  int32_t num_experts;
  int32_t num_slots;    // S, of a rank
  int32_t top_k;        // K
  int32_t hidden_size;  // H
  int32_t row_bytes;    // of a row of x, a multiple of 4
  int32_t max_tokens;   // that a rank dispatches at a time; more go in rounds
};

struct ExpertServiceBytesParams {
  ExpertServiceShape shape;
  int64_t* num_bytes;  // [1] receives the size of the segment
};
CallStatus ExpertServiceBytes(const ExpertServiceBytesParams& p);

struct ExpertServiceOpenParams {
  ExpertServiceShape shape;
  int32_t file;  // descriptor of the segment, empty at first; may be closed afterwards
  int32_t rank;
  double timeout_s;  // how long combine_experts waits for a rank
  int32_t* service;  // [1] receives the handle
};
CallStatus ExpertServiceOpen(const ExpertServiceOpenParams& p);

// A layer whose slots are empty as yet.
struct ExpertServiceLayerParams {
  int32_t service;
  int32_t layer;
  int32_t num_experts;  // E of the layer
  int32_t top_k;
  ExpertShape shape;
};
CallStatus ExpertServiceLayer(const ExpertServiceLayerParams& p);

// Have the experts run on a GPU from now on, which also gives this rank's rows to the others: see
// cuda/expert_gpu.h. Before any layer; the service then looks for jobs, as a GPU wakes no thread.
struct ExpertServiceRunnerParams {
  int32_t service;
  const void* runner;  // see cpu/runtime/expert_runner.h; outlives the service
};
CallStatus ExpertServiceRunner(const ExpertServiceRunnerParams& p);

// What lies in a slot of this rank from now on; waits until no expert is run. What asks for another expert there is
// sent back to its rank: a processor's asks anew, a GPU's pass fails.
struct ExpertServiceSlotParams {
  int32_t service;
  int32_t layer;
  int32_t slot;
  int32_t expert;  // -1 = none
  ExpertWeights weights;
};
CallStatus ExpertServiceSlot(const ExpertServiceSlotParams& p);

// Whether ranks may ask for the expert in a slot of this rank.
struct ExpertServicePublishParams {
  int32_t service;
  int32_t layer;
  int32_t slot;
  int32_t is_published;
  int64_t* version;  // [1] receives the number of the table from now on
};
CallStatus ExpertServicePublish(const ExpertServicePublishParams& p);

struct ExpertServicePlacementParams {
  int32_t service;
  int32_t layer;
  int32_t has_retired;  // 1: with those that only jobs of older tables ask for
  int32_t* experts;     // [R, S] receives the published expert of each slot, -1 = none
};
CallStatus ExpertServicePlacement(const ExpertServicePlacementParams& p);

// The experts that ranks shall have, which one rank says and each reaches by itself. Nothing in the segment follows
// from them.
struct ExpertServiceTargetParams {
  int32_t service;
  int32_t layer;
  int32_t is_new;    // 1: say it, 0: read it
  int32_t* experts;  // [R, S] those of each rank in any order, -1 = none; read while they are written: all -1
};
CallStatus ExpertServiceTarget(const ExpertServiceTargetParams& p);

struct ExpertServiceCountsParams {
  int32_t service;
  int64_t* rows;    // [L, num_experts] receives the rows of each expert so far, of all ranks; may be nullptr
  int64_t* served;  // [R, L] receives the rows that each rank has run its experts on so far; may be nullptr
};
CallStatus ExpertServiceCounts(const ExpertServiceCountsParams& p);

// Wait until no rank has a job that was made from an older table than `version`.
struct ExpertServiceOlderJobsParams {
  int32_t service;
  int64_t version;
  double timeout_s;
  int32_t* is_over;  // [1] receives 0 where the time is over
};
CallStatus ExpertServiceOlderJobs(const ExpertServiceOlderJobsParams& p);

enum class ExpertRankState : int32_t { kAbsent = 0, kLoading = 1, kServing = 2, kLeaving = 3, kGone = 4 };

struct ExpertServiceRanksParams {
  int32_t service;
  int32_t* states;        // [R] receives ExpertRankState; a rank whose process has ended is loading, unless it is gone
  int32_t* incarnations;  // [R] receives how often each was opened
  int32_t* is_lost;       // [1] receives 1 where the last op here failed because a rank did not run its experts, else 0
};
CallStatus ExpertServiceRanks(const ExpertServiceRanksParams& p);

// Which ranks wait for which to run their experts.
struct ExpertServiceAwaitedParams {
  int32_t service;
  int32_t* is_awaited;  // [R, R] receives 1 where the rank of the row has given rows to that of the column, else 0
};
CallStatus ExpertServiceAwaited(const ExpertServiceAwaitedParams& p);

// Say that a rank will not come back; who waits for it fails.
struct ExpertServiceGoneParams {
  int32_t service;
  int32_t rank;
};
CallStatus ExpertServiceGone(const ExpertServiceGoneParams& p);

// Say that ranks end with the requests that they have: what they wait for of a rank that is loading fails at once.
struct ExpertServiceDrainParams {
  int32_t service;
  int32_t first_rank;
  int32_t num_ranks;
};
CallStatus ExpertServiceDrain(const ExpertServiceDrainParams& p);

struct ExpertServiceWaitParams {
  int32_t service;
  double timeout_s;
};
// Publish all slots that have an expert, and serve from now on.
CallStatus ExpertServiceStart(const ExpertServiceWaitParams& p);
// Wait until all ranks serve.
CallStatus ExpertServiceMeet(const ExpertServiceWaitParams& p);
// Serve until no other rank serves: each leaves too, is gone, or is loading. Then this one is gone.
CallStatus ExpertServiceLeave(const ExpertServiceWaitParams& p);
// Make what this process waits for fail, at once and for ever.
CallStatus ExpertServiceAbort(const ExpertServiceWaitParams& p);
// No op may run on it, then or later.
CallStatus ExpertServiceClose(const ExpertServiceWaitParams& p);

}  // namespace fdsd
