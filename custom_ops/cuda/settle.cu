#include "fdsd/batch.h"
#include "numbers.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 128;

struct SettleArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> token_table;
  DevicePtr<const int32_t> num_tokens;
  DevicePtr<const int32_t> block_tables;
  DevicePtr<const int32_t> made_drafts;
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> cu_num_logits;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<int32_t> input_ids;
  DevicePtr<int32_t> positions;
  DevicePtr<int64_t> slot_mapping;
  DevicePtr<int32_t> num_computed;
  DevicePtr<int32_t> seq_lens;
  DevicePtr<int32_t> output_positions;
  DevicePtr<int32_t> draft_token_ids;
};

struct SettleShape {
  int32_t max_tokens_per_row;
  int32_t max_blocks;
  int32_t max_made;
  int32_t block_size;
};

// Block (r): the tokens, drafts and rows of logits of request r.
__global__ __launch_bounds__(kThreads) void SettleStepKernel(SettleShape shape, SettleArrays a) {
  const int r = static_cast<int>(blockIdx.x);
  const int32_t first = a.query_start_loc[r];
  const int32_t num_new = a.query_start_loc[r + 1] - first;
  if (num_new == 0) return;
  const int64_t table_row = a.table_rows[r];
  const int32_t num_tokens = a.num_tokens[table_row];
  const int32_t num_assumed = a.num_computed[r];
  const int32_t shift = max(num_assumed - (num_tokens - 1), 0);
  const int32_t num_computed = num_assumed - shift;
  const int32_t first_draft = a.cu_num_draft[r];
  const int32_t num_drafts = a.cu_num_draft[r + 1] - first_draft;
  for (int i = threadIdx.x; i < num_drafts; i += kThreads)
    if (a.draft_token_ids[first_draft + i] < 0)
      a.draft_token_ids[first_draft + i] = a.made_drafts[table_row * shape.max_made + i];
  __syncthreads();  // the drafts are there, and all threads have read num_computed
#pragma unroll 1    // few tokens; several at a time spill registers on sm_100
  for (int i = threadIdx.x; i < num_new; i += kThreads) {
    const int32_t place = num_computed + i;
    const int64_t block = a.block_tables[table_row * shape.max_blocks + place / shape.block_size];
    a.positions[first + i] = a.positions[first + i] - shift;
    a.slot_mapping[first + i] = block * shape.block_size + place % shape.block_size;
    a.input_ids[first + i] = place < num_tokens
                                 ? static_cast<int32_t>(a.token_table[table_row * shape.max_tokens_per_row + place])
                                 : static_cast<int32_t>(a.draft_token_ids[first_draft + place - num_tokens]);
  }
  const int32_t last_row = a.cu_num_logits[r + 1];
  for (int32_t l = a.cu_num_logits[r] + static_cast<int32_t>(threadIdx.x); l < last_row; l += kThreads)
    a.output_positions[l] = a.output_positions[l] - shift;
  if (threadIdx.x != 0) return;
  a.num_computed[r] = num_computed;
  a.seq_lens[r] = a.seq_lens[r] - shift;
}

struct GroupArrays {
  DevicePtr<const int64_t> first_slots;
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> seq_lens;
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> block_tables;
  DevicePtr<int64_t> slot_mapping;
};

// The request of row t, the number of requests where it is of none: as many as end at t or before.
__device__ int32_t RequestOf(DevicePtr<const int32_t> query_start_loc, int32_t num_requests, int32_t t) {
  int32_t r = 0;
  for (int32_t end = num_requests; r < end;) {
    const int32_t middle = (r + end) / 2;
    if (query_start_loc[middle + 1] <= t)
      r = middle + 1;
    else
      end = middle;
  }
  return r;
}

// Thread (t): the slot of token t.
__global__ __launch_bounds__(kThreads) void GroupSlotsKernel(int32_t num_requests, int32_t num_tokens,
                                                             int32_t max_blocks, int32_t block_size, GroupArrays a) {
  const int t = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (t >= num_tokens) return;
  const int32_t r = RequestOf(a.query_start_loc, num_requests, t);
  if (r == num_requests || a.first_slots[t] < 0) {
    a.slot_mapping[t] = -1;
    return;
  }
  const int32_t place = a.seq_lens[r] - (a.query_start_loc[r + 1] - t);
  const int64_t block = a.block_tables[static_cast<int64_t>(a.table_rows[r]) * max_blocks + place / block_size];
  a.slot_mapping[t] = block * block_size + place % block_size;
}

struct RowArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> seq_lens;
  DevicePtr<int32_t> row_table_rows;
  DevicePtr<int32_t> row_starts;
  DevicePtr<int32_t> row_lens;
};

// Thread (t): the request that row t becomes, and where it begins; the last one only says where all end.
__global__ __launch_bounds__(kThreads) void RowRequestsKernel(int32_t num_requests, int32_t num_rows, RowArrays a) {
  const int t = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (t > num_rows) return;
  a.row_starts[t] = min(t, static_cast<int32_t>(a.query_start_loc[num_requests]));
  if (t == num_rows) return;
  const int32_t r = RequestOf(a.query_start_loc, num_requests, t);
  a.row_table_rows[t] = r == num_requests ? 0 : static_cast<int32_t>(a.table_rows[r]);
  a.row_lens[t] = r == num_requests ? 0 : static_cast<int32_t>(a.seq_lens[r]);
}

struct TargetArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> num_computed;
  DevicePtr<const int32_t> num_new;
  DevicePtr<const int32_t> cu_num_logits;
  DevicePtr<const int32_t> cu_num_output;
  DevicePtr<const int32_t> num_committed;
  DevicePtr<const int32_t> num_blocks;
  DevicePtr<int32_t> num_valid;
  DevicePtr<int32_t> num_kv_slots;
};

// Thread (r): what was run of request r.
__global__ __launch_bounds__(kThreads) void TargetStepKernel(int32_t num_requests, int32_t block_size,
                                                             int32_t max_tokens_per_row, TargetArrays a) {
  const int r = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (r >= num_requests) return;
  const bool has_output = a.cu_num_output[r + 1] > a.cu_num_output[r];
  // A row whose tokens were all run and that has no output nevertheless has failed, or runs its newest token again.
  const int32_t num_logits = a.cu_num_logits[r + 1] - a.cu_num_logits[r];
  const int32_t num_run = a.num_computed[r] + a.num_new[r] - num_logits;
  const int64_t num_slots = static_cast<int64_t>(a.num_blocks[a.table_rows[r]]) * block_size;
  a.num_valid[r] = has_output ? a.num_committed[r] - 1 : num_run;
  a.num_kv_slots[r] = static_cast<int32_t>(num_slots < max_tokens_per_row ? num_slots : max_tokens_per_row);
}

}  // namespace

Error SettleStep(const SettleStepParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  const SettleArrays arrays{DevicePtr<const int32_t>(p.table_rows),
                            DevicePtr<const int32_t>(p.token_table),
                            DevicePtr<const int32_t>(p.num_tokens),
                            DevicePtr<const int32_t>(p.block_tables),
                            DevicePtr<const int32_t>(p.made_drafts),
                            DevicePtr<const int32_t>(p.rows.query_start_loc),
                            DevicePtr<const int32_t>(p.rows.cu_num_logits),
                            DevicePtr<const int32_t>(p.rows.cu_num_draft),
                            DevicePtr<int32_t>(p.maps.input_ids),
                            DevicePtr<int32_t>(p.maps.positions),
                            DevicePtr<int64_t>(p.maps.slot_mapping),
                            DevicePtr<int32_t>(p.maps.num_computed),
                            DevicePtr<int32_t>(p.maps.seq_lens),
                            DevicePtr<int32_t>(p.maps.output_positions),
                            DevicePtr<int32_t>(p.maps.draft_token_ids)};
  const SettleShape shape{p.max_tokens_per_row, p.max_blocks, p.max_made, p.block_size};
  const LaunchShape per_request{dim3(static_cast<unsigned>(p.num_requests)), dim3(kThreads)};
  return Launch<SettleStepKernel>(per_request, stream, shape, arrays);
}

Error GroupSlots(const GroupSlotsParams& p, Stream stream) {
  if (p.num_requests < 0 || p.num_tokens < 0) return "num_tokens: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  const GroupArrays arrays{DevicePtr<const int64_t>(p.first_slots),  DevicePtr<const int32_t>(p.query_start_loc),
                           DevicePtr<const int32_t>(p.seq_lens),     DevicePtr<const int32_t>(p.table_rows),
                           DevicePtr<const int32_t>(p.block_tables), DevicePtr<int64_t>(p.slot_mapping)};
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(p.num_tokens, kThreads))), dim3(kThreads)};
  return Launch<GroupSlotsKernel>(shape, stream, p.num_requests, p.num_tokens, p.max_blocks, p.block_size, arrays);
}

Error RowRequests(const RowRequestsParams& p, Stream stream) {
  if (p.num_requests < 0 || p.num_rows < 0) return "num_rows: expected no negative number";
  const RowArrays arrays{DevicePtr<const int32_t>(p.table_rows), DevicePtr<const int32_t>(p.query_start_loc),
                         DevicePtr<const int32_t>(p.seq_lens),   DevicePtr<int32_t>(p.row_table_rows),
                         DevicePtr<int32_t>(p.row_starts),       DevicePtr<int32_t>(p.row_lens)};
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(p.num_rows + 1, kThreads))), dim3(kThreads)};
  return Launch<RowRequestsKernel>(shape, stream, p.num_requests, p.num_rows, arrays);
}

Error TargetStep(const TargetStepParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  const TargetArrays arrays{DevicePtr<const int32_t>(p.table_rows),    DevicePtr<const int32_t>(p.num_computed),
                            DevicePtr<const int32_t>(p.num_new),       DevicePtr<const int32_t>(p.cu_num_logits),
                            DevicePtr<const int32_t>(p.cu_num_output), DevicePtr<const int32_t>(p.num_committed),
                            DevicePtr<const int32_t>(p.num_blocks),    DevicePtr<int32_t>(p.num_valid),
                            DevicePtr<int32_t>(p.num_kv_slots)};
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(p.num_requests, kThreads))), dim3(kThreads)};
  return Launch<TargetStepKernel>(shape, stream, p.num_requests, p.block_size, p.max_tokens_per_row, arrays);
}

}  // namespace fdsd::cuda
