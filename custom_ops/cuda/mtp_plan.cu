#include "fdsd/mtp.h"
#include "ops.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

struct PlanShape {
  int32_t num_requests;
  int32_t max_requests;
  int32_t num_layers;
  int32_t num_steps;
  int32_t max_position;
  int32_t block_size;
  int32_t max_filled;
  int32_t num_newest;
  int32_t num_more;
  int32_t reads_hidden;
};

struct PlanArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> num_committed;
  DevicePtr<const int32_t> max_draft_len;
  DevicePtr<const int32_t> num_computed;
  DevicePtr<const int32_t> num_valid;
  DevicePtr<const int32_t> num_kv_slots;
  DevicePtr<const int32_t> next_slot;
  DevicePtr<const int32_t> num_begun;
  DevicePtr<int32_t> begin;
  DevicePtr<int32_t> ends;
  DevicePtr<int32_t> cu_num_draft;
  DevicePtr<int32_t> num_wanted;
  DevicePtr<int32_t> draft_start_loc;
  DevicePtr<int32_t> draft_token_ids;
  DevicePtr<int32_t> num_filling;
  DevicePtr<int32_t> num_tokens;
  DevicePtr<int32_t> num_drafting;
};

// What one request does in a step.
struct RequestPlan {
  int32_t begin;
  int32_t end;
  int32_t num_drafts;

  // Fills at most so many slots.
  __device__ void Limit(int32_t max_filled) {
    if (end - begin <= max_filled) return;
    end = begin + max(max_filled, 0);
    num_drafts = 0;
  }
};

__device__ RequestPlan PlanOf(const PlanShape& shape, const PlanArrays& a, int32_t r) {
  const int32_t table_row = a.table_rows[r];
  const int32_t next_slot = a.next_slot[table_row];
  int32_t begin = max(next_slot, shape.reads_hidden);
  const int32_t num_valid = a.num_valid[r];
  const int32_t num_computed = a.num_computed[r];
  if (next_slot < 0 || num_valid <= num_computed) return {begin, begin, 0};
  const int32_t committed = a.num_committed[r];
  const int32_t num_kv_slots = a.num_kv_slots[r];
  const int32_t end = min(min(num_valid + 1, committed), num_kv_slots);
  int32_t num_drafts = 0;
  if (end == committed) {
    // Draft i is made at slot committed - 1 + i, which needs a block and a position.
    const int32_t room = min(num_kv_slots, shape.max_position) - committed + 1 - shape.num_more;
    num_drafts = max(min(min(static_cast<int32_t>(a.max_draft_len[r]), shape.num_steps), room), 0);
  }
  const bool must_fill = shape.reads_hidden != 0 && (num_computed < a.num_begun[table_row] ||
                                                     next_slot / shape.block_size < num_valid / shape.block_size);
  if (num_drafts == 0 && !must_fill) return {begin, begin, 0};
  if (end - begin > shape.num_newest) begin = end - shape.num_newest;
  return {begin, end, num_drafts};
}

// One block: requests in order, kThreads at a time.
__global__ __launch_bounds__(kThreads) void MtpPlanKernel(PlanShape shape, PlanArrays a) {
  int32_t num_needed = 0;
  int32_t num_drafts = 0;
  int32_t num_last = 0;
  int32_t num_filling = 0;
  if (threadIdx.x == 0) {
    a.cu_num_draft[0] = 0;
    a.draft_start_loc[0] = 0;
  }
  for (int32_t first = 0; first < shape.num_requests; first += kThreads) {
    const int32_t r = first + static_cast<int32_t>(threadIdx.x);
    const bool is_request = r < shape.num_requests;
    RequestPlan plan{0, 0, 0};
    if (is_request) plan = PlanOf(shape, a, r);
    // Slots that all requests up to this one need: those before it get them as long as there are any.
    int32_t more_needed;
    const int32_t own_slots = plan.end - plan.begin;
    const int32_t needed = num_needed + BlockRunningSum<kThreads>(own_slots, &more_needed);
    plan.Limit(shape.max_filled - (needed - own_slots));
    num_needed += more_needed;
    const bool is_last = is_request && plan.num_drafts >= shape.num_layers;
    int32_t more_drafts;
    int32_t more_last;
    int32_t more_filling;
    const int32_t drafts = num_drafts + BlockRunningSum<kThreads>(plan.num_drafts, &more_drafts);
    const int32_t last = num_last + BlockRunningSum<kThreads>(is_last ? 1 : 0, &more_last);
    BlockRunningSum<kThreads>(plan.end > plan.begin ? 1 : 0, &more_filling);
    if (is_request) {
      a.begin[r] = plan.begin;
      for (int32_t layer = 0; layer < shape.num_layers; ++layer)
        a.ends[static_cast<int64_t>(layer) * shape.max_requests + r] = plan.end + (plan.num_drafts > layer ? layer : 0);
      a.num_wanted[r] = plan.num_drafts;
      a.cu_num_draft[r + 1] = drafts;
      a.draft_start_loc[r + 1] = last;
      for (int32_t i = drafts - plan.num_drafts; i < drafts; ++i) a.draft_token_ids[i] = -1;
    }
    num_drafts += more_drafts;
    num_last += more_last;
    num_filling += more_filling;
  }
  if (threadIdx.x == 0) a.num_filling[0] = num_filling;
}

// Block (i): how many slots layer i fills, and how many requests get more than i drafts.
__global__ __launch_bounds__(kThreads) void MtpCountsKernel(PlanShape shape, int32_t num_counts, PlanArrays a) {
  const int32_t i = static_cast<int32_t>(blockIdx.x);
  int32_t num_tokens = 0;
  int32_t num_drafting = 0;
  for (int32_t first = 0; first < shape.num_requests; first += kThreads) {
    const int32_t r = first + static_cast<int32_t>(threadIdx.x);
    const bool is_request = r < shape.num_requests;
    int32_t own_tokens = 0;
    if (is_request && i < shape.num_layers)
      own_tokens = a.ends[static_cast<int64_t>(i) * shape.max_requests + r] - a.begin[r];
    int32_t more_tokens;
    int32_t more_drafting;
    BlockRunningSum<kThreads>(own_tokens, &more_tokens);
    BlockRunningSum<kThreads>(is_request && a.num_wanted[r] > i ? 1 : 0, &more_drafting);
    num_tokens += more_tokens;
    num_drafting += more_drafting;
  }
  if (threadIdx.x != 0) return;
  if (i < shape.num_layers) a.num_tokens[i] = num_tokens;
  if (i < num_counts) a.num_drafting[i] = num_drafting;
}

struct HoldArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> begin;
  DevicePtr<const int32_t> end;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const int32_t> draft_token_ids;
  DevicePtr<int32_t> next_slot;
  DevicePtr<int32_t> made_drafts;
};

// Thread (r): request r.
__global__ __launch_bounds__(kThreads) void MtpHoldKernel(int32_t num_requests, int32_t max_made, HoldArrays a) {
  const int r = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (r >= num_requests) return;
  const int64_t table_row = a.table_rows[r];
  const int32_t end = a.end[r];
  if (end > a.begin[r]) a.next_slot[table_row] = end;
  const int32_t first = a.cu_num_draft[r];
  const int32_t num_drafts = a.cu_num_draft[r + 1] - first;
  for (int32_t i = 0; i < max_made; ++i)
    a.made_drafts[table_row * max_made + i] =
        i < num_drafts ? max(static_cast<int32_t>(a.draft_token_ids[first + i]), 0) : 0;
}

}  // namespace

Error MtpPlan(const MtpPlanParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.num_layers <= 0) return "ends: expected a row for every layer, got none";
  if (p.num_requests > p.max_requests) return "ends: expected a column for every request, got too few";
  if (p.num_steps < 0) return "num_steps: expected >= 0, got a negative number";
  if (p.num_counts <= p.num_steps || p.num_counts <= p.num_layers)
    return "num_drafting: expected more than num_steps and layers, got fewer";
  if (p.num_drafts < static_cast<int64_t>(p.num_requests) * p.num_steps)
    return "draft_token_ids: expected room for num_steps drafts of every request, got less";
  if (p.max_filled < 0) return "max_filled: expected >= 0, got a negative number";
  if (p.num_more < 0) return "num_more: expected >= 0, got a negative number";
  if (p.num_newest < 1) return "num_newest: expected at least 1, got less";
  const PlanShape shape{p.num_requests, p.max_requests, p.num_layers, p.num_steps, p.max_position,
                        p.block_size,   p.max_filled,   p.num_newest, p.num_more,  p.reads_hidden};
  const PlanArrays arrays{DevicePtr<const int32_t>(p.step.table_rows),
                          DevicePtr<const int32_t>(p.step.num_committed),
                          DevicePtr<const int32_t>(p.step.max_draft_len),
                          DevicePtr<const int32_t>(p.step.num_computed),
                          DevicePtr<const int32_t>(p.step.num_valid),
                          DevicePtr<const int32_t>(p.step.num_kv_slots),
                          DevicePtr<const int32_t>(p.kept.next_slot),
                          DevicePtr<const int32_t>(p.kept.num_begun),
                          DevicePtr<int32_t>(p.out.begin),
                          DevicePtr<int32_t>(p.out.ends),
                          DevicePtr<int32_t>(p.out.cu_num_draft),
                          DevicePtr<int32_t>(p.out.num_wanted),
                          DevicePtr<int32_t>(p.out.draft_start_loc),
                          DevicePtr<int32_t>(p.out.draft_token_ids),
                          DevicePtr<int32_t>(p.out.num_filling),
                          DevicePtr<int32_t>(p.out.num_tokens),
                          DevicePtr<int32_t>(p.out.num_drafting)};
  const LaunchShape one_block{dim3(1), dim3(kThreads)};
  if (Error error = Launch<MtpPlanKernel>(one_block, stream, shape, arrays)) return error;
  const LaunchShape per_count{dim3(static_cast<unsigned>(p.num_counts)), dim3(kThreads)};
  return Launch<MtpCountsKernel>(per_count, stream, shape, p.num_counts, arrays);
}

Error MtpHold(const MtpHoldParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.max_made < 0) return "max_made: expected no negative number";
  const HoldArrays arrays{DevicePtr<const int32_t>(p.table_rows),
                          DevicePtr<const int32_t>(p.begin),
                          DevicePtr<const int32_t>(p.end),
                          DevicePtr<const int32_t>(p.cu_num_draft),
                          DevicePtr<const int32_t>(p.draft_token_ids),
                          DevicePtr<int32_t>(p.next_slot),
                          DevicePtr<int32_t>(p.made_drafts)};
  const LaunchShape shape{dim3(static_cast<unsigned>((p.num_requests + kThreads - 1) / kThreads)), dim3(kThreads)};
  return Launch<MtpHoldKernel>(shape, stream, p.num_requests, p.max_made, arrays);
}

}  // namespace fdsd::cuda
