#include "fdsd/attention.h"
#include "fdsd/batch.h"
#include "numbers.h"
#include "ops.h"
#include "row_copy.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kScanThreads = 256;

struct PrepareArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> token_table;
  DevicePtr<const int32_t> num_tokens;
  DevicePtr<const int32_t> block_tables;
  DevicePtr<const int32_t> num_computed;
  DevicePtr<const int32_t> num_new;
  DevicePtr<const int32_t> draft_token_ids;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const int32_t> draft_parents;  // nullptr = chains
  DevicePtr<int32_t> input_ids;
  DevicePtr<int32_t> positions;
  DevicePtr<int64_t> slot_mapping;
  DevicePtr<int64_t> tree_mask;
  DevicePtr<int32_t> query_start_loc;
  DevicePtr<int32_t> seq_lens;
  DevicePtr<int32_t> logits_indices;
  DevicePtr<int32_t> cu_num_logits;
  DevicePtr<int32_t> batch_id_per_output;
  DevicePtr<int32_t> output_positions;
  DevicePtr<int32_t> parent_rows;

  // The draft of its request that one follows, -1 = none.
  __device__ __forceinline__ int32_t ParentOf(int32_t first_draft, int32_t draft) const {
    return draft_parents == nullptr ? draft - 1 : static_cast<int32_t>(draft_parents[first_draft + draft]);
  }
};

// The rows of logits of a request: none while the step does not reach its last known token.
__device__ int32_t NumLogits(const PrepareArrays& a, int r) {
  const int32_t num_draft = a.cu_num_draft[r + 1] - a.cu_num_draft[r];
  const int32_t num_known = a.num_tokens[a.table_rows[r]] + num_draft;
  return a.num_computed[r] + a.num_new[r] == num_known ? num_draft + 1 : 0;
}

// One block: where each request's tokens and rows of logits begin.
__global__ __launch_bounds__(kScanThreads) void StepOffsetsKernel(int32_t num_requests, PrepareArrays a) {
  int32_t num_tokens = 0;
  int32_t num_logits = 0;
  if (threadIdx.x == 0) {
    a.query_start_loc[0] = 0;
    a.cu_num_logits[0] = 0;
  }
  for (int first = 0; first < num_requests; first += kScanThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    int32_t more_tokens;
    int32_t more_logits;
    const int32_t tokens = BlockRunningSum<kScanThreads>(r < num_requests ? a.num_new[r] : 0, &more_tokens);
    const int32_t logits = BlockRunningSum<kScanThreads>(r < num_requests ? NumLogits(a, r) : 0, &more_logits);
    if (r < num_requests) {
      a.query_start_loc[r + 1] = num_tokens + tokens;
      a.cu_num_logits[r + 1] = num_logits + logits;
      a.seq_lens[r] = a.num_computed[r] + a.num_new[r];
    }
    num_tokens += more_tokens;
    num_logits += more_logits;
  }
}

// Block (r): the tokens and rows of logits of request r.
__global__ __launch_bounds__(kThreads) void StepMapsKernel(int32_t max_tokens_per_row, int32_t max_blocks,
                                                           int32_t block_size, PrepareArrays a) {
  const int r = static_cast<int>(blockIdx.x);
  const int64_t table_row = a.table_rows[r];
  const int32_t num_committed = a.num_tokens[table_row];
  const int32_t first_draft = a.cu_num_draft[r];
  const int32_t begin = a.query_start_loc[r];
  const int32_t num_new = a.num_new[r];
  const int32_t num_computed = a.num_computed[r];
  for (int i = threadIdx.x; i < num_new; i += kThreads) {
    const int32_t place = num_computed + i;
    const int32_t own_draft = place - num_committed;
    a.input_ids[begin + i] = own_draft >= 0 ? a.draft_token_ids[first_draft + own_draft]
                                            : a.token_table[table_row * max_tokens_per_row + place];
    const int64_t block = a.block_tables[table_row * max_blocks + place / block_size];
    a.slot_mapping[begin + i] = block * block_size + place % block_size;
    // Up the tree, to the newest committed token. All tokens before that are seen.
    int32_t num_on_path = 0;
    const int32_t num_before = min(num_new, num_committed - num_computed);
    uint64_t seen = min(i, num_before) < kMaxTreeRows ? (uint64_t{1} << min(i, num_before)) - 1 : 0;
    for (int32_t d = own_draft; d >= 0; d = a.ParentOf(first_draft, d), ++num_on_path)
      if (d != own_draft && num_before + d < kMaxTreeRows) seen |= uint64_t{1} << (num_before + d);
    a.positions[begin + i] = own_draft >= 0 ? num_committed - 1 + num_on_path : place;
    if (num_new <= kMaxTreeRows) a.tree_mask[begin + i] = static_cast<int64_t>(seen);
  }
  const int32_t first_row = a.cu_num_logits[r];
  const int32_t num_rows = a.cu_num_logits[r + 1] - first_row;
  for (int i = threadIdx.x; i < num_rows; i += kThreads) {
    a.logits_indices[first_row + i] = begin + num_new - num_rows + i;
    a.batch_id_per_output[first_row + i] = r;
    // Row i is that of draft i - 1.
    int32_t num_on_path = 0;
    for (int32_t d = i - 1; d >= 0; d = a.ParentOf(first_draft, d)) ++num_on_path;
    a.output_positions[first_row + i] = num_committed + num_on_path;
    a.parent_rows[first_row + i] = i > 0 ? a.ParentOf(first_draft, i - 1) + 1 : -1;
  }
}

struct AppendArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> token_ids;
  DevicePtr<const int32_t> cu_num_output;
  DevicePtr<const int32_t> planned_drafts;
  DevicePtr<int32_t> tokens;
  DevicePtr<int32_t> num_tokens;
  DevicePtr<const int32_t> max_total;
  DevicePtr<const int32_t> count_rows;
  DevicePtr<int32_t> token_counts;
  DevicePtr<int32_t> num_committed;
  DevicePtr<int32_t> max_draft_len;
};

// Block (r): the output of request r.
__global__ __launch_bounds__(kThreads) void AppendTokensKernel(int32_t max_tokens_per_row, int32_t vocab_size,
                                                               AppendArrays a) {
  const int r = static_cast<int>(blockIdx.x);
  const int64_t table_row = a.table_rows[r];
  const int32_t begin = a.cu_num_output[r];
  const int32_t num_output = a.cu_num_output[r + 1] - begin;
  const int32_t num_before = a.num_tokens[table_row];
  const int64_t count_row = a.count_rows[table_row];
  for (int i = threadIdx.x; i < num_output; i += kThreads) {
    const int32_t token = a.token_ids[begin + i];
    a.tokens[table_row * max_tokens_per_row + num_before + i] = token;
    // A token may be twice in the output.
    if (count_row >= 0) atomicAdd(a.token_counts + (count_row * vocab_size + token), 1);
  }
  __syncthreads();  // all threads have read how many there were
  if (threadIdx.x != 0) return;
  const int32_t num_tokens = num_before + num_output;
  const int32_t room = max(a.max_total[table_row] - num_tokens - 1, 0);
  a.num_tokens[table_row] = num_tokens;
  a.num_committed[r] = num_tokens;
  a.max_draft_len[r] = num_output > 0 ? min(a.planned_drafts[r], room) : 0;
}

// Block (row, part): kThreads neighbouring units of a row, which is `units_per_row` of them long.
template <typename Unit>
__global__ __launch_bounds__(kThreads) void GatherRowsKernel(int64_t units_per_row, DevicePtr<const Unit> x,
                                                             DevicePtr<const int32_t> indices, DevicePtr<Unit> y) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (i >= units_per_row) return;
  const int64_t row = blockIdx.x;
  y[row * units_per_row + i] = x[indices[row] * units_per_row + i];
}

template <typename Unit>
Error LaunchGatherRows(const GatherOutputRowsParams& p, Stream stream) {
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t num_parts = DivideUp(units, kThreads);
  if (num_parts > 65535)
    return "row_bytes: expected rows of at most 65535 * 128 units of 16, 4, 2 or 1 bytes, got more";
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_rows_out), static_cast<unsigned>(num_parts)),
                          dim3(kThreads)};
  return Launch<GatherRowsKernel<Unit>>(shape, stream, units, DevicePtr<const Unit>(p.x),
                                        DevicePtr<const int32_t>(p.indices), DevicePtr<Unit>(p.y));
}

}  // namespace

Error PrepareBatch(const PrepareBatchParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  const PrepareArrays arrays{DevicePtr<const int32_t>(p.table_rows),
                             DevicePtr<const int32_t>(p.token_table),
                             DevicePtr<const int32_t>(p.num_tokens),
                             DevicePtr<const int32_t>(p.block_tables),
                             DevicePtr<const int32_t>(p.plan.num_computed),
                             DevicePtr<const int32_t>(p.plan.num_new),
                             DevicePtr<const int32_t>(p.plan.draft_token_ids),
                             DevicePtr<const int32_t>(p.plan.cu_num_draft),
                             DevicePtr<const int32_t>(p.plan.draft_parents),
                             DevicePtr<int32_t>(p.out.input_ids),
                             DevicePtr<int32_t>(p.out.positions),
                             DevicePtr<int64_t>(p.out.slot_mapping),
                             DevicePtr<int64_t>(p.out.tree_mask),
                             DevicePtr<int32_t>(p.out.query_start_loc),
                             DevicePtr<int32_t>(p.out.seq_lens),
                             DevicePtr<int32_t>(p.out.logits_indices),
                             DevicePtr<int32_t>(p.out.cu_num_logits),
                             DevicePtr<int32_t>(p.out.batch_id_per_output),
                             DevicePtr<int32_t>(p.out.output_positions),
                             DevicePtr<int32_t>(p.out.parent_rows)};
  const LaunchShape one_block{dim3(1), dim3(kScanThreads)};
  if (Error error = Launch<StepOffsetsKernel>(one_block, stream, p.num_requests, arrays)) return error;
  const LaunchShape per_request{dim3(static_cast<unsigned>(p.num_requests)), dim3(kThreads)};
  return Launch<StepMapsKernel>(per_request, stream, p.max_tokens_per_row, p.max_blocks, p.block_size, arrays);
}

Error AppendTokens(const AppendTokensParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  const AppendArrays arrays{DevicePtr<const int32_t>(p.table_rows),      DevicePtr<const int32_t>(p.token_ids),
                            DevicePtr<const int32_t>(p.cu_num_output),   DevicePtr<const int32_t>(p.planned_drafts),
                            DevicePtr<int32_t>(p.table.tokens),          DevicePtr<int32_t>(p.table.num_tokens),
                            DevicePtr<const int32_t>(p.table.max_total), DevicePtr<const int32_t>(p.table.count_rows),
                            DevicePtr<int32_t>(p.table.token_counts),    DevicePtr<int32_t>(p.num_committed),
                            DevicePtr<int32_t>(p.max_draft_len)};
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_requests)), dim3(kThreads)};
  return Launch<AppendTokensKernel>(shape, stream, p.max_tokens_per_row, p.vocab_size, arrays);
}

Error GatherOutputRows(const GatherOutputRowsParams& p, Stream stream) {
  if (p.num_rows_out < 0) return "num_rows_out: expected no negative number";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  const void* const rows[] = {p.x, p.y};
  return WithCopyUnit(p.row_bytes, rows, [&]<typename Unit>(Unit) { return LaunchGatherRows<Unit>(p, stream); });
}

}  // namespace fdsd::cuda
