#include "fdsd/mtp.h"
#include "ops.h"
#include "row_copy.h"
#include "scan.h"
#include "token_weights.h"

namespace fdsd::cuda {
namespace {

constexpr int kScanThreads = 256;

struct DraftShape {
  int32_t num_requests;
  int32_t room;       // A
  int32_t next_room;  // B
  int32_t vocab_size;
  int32_t step;
  float min_prob;
  int32_t max_blocks;
  int32_t block_size;
};

struct DraftArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> num_committed;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const float> min_survival;
  DevicePtr<const float> logits;
  DevicePtr<int32_t> num_wanted;
  DevicePtr<int32_t> draft_token_ids;
  DevicePtr<float> draft_prob;
  DevicePtr<const int32_t> block_table;
  DevicePtr<int32_t> input_ids;
  DevicePtr<int32_t> positions;
  DevicePtr<int64_t> slot_mapping;
  DevicePtr<int32_t> query_start_loc;
  DevicePtr<int32_t> seq_lens;
  DevicePtr<int32_t> num_continued;
  // In the workspace:
  DevicePtr<int32_t> requests;  // [A] request of each row, -1 = padding
  DevicePtr<int32_t> sources;   // [B] row that each row of the next pass continues
};

// One block: the request of every row.
__global__ __launch_bounds__(kScanThreads) void DraftingRequestsKernel(DraftShape shape, DraftArrays a) {
  int32_t num_rows = 0;
  for (int first = 0; first < shape.num_requests; first += kScanThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    const bool drafts = r < shape.num_requests && a.num_wanted[r] > shape.step;
    int32_t more;
    const int32_t end = num_rows + BlockRunningSum<kScanThreads>(drafts ? 1 : 0, &more);
    if (drafts) a.requests[end - 1] = r;
    num_rows += more;
  }
  for (int32_t row = num_rows + static_cast<int32_t>(threadIdx.x); row < shape.room; row += kScanThreads)
    a.requests[row] = -1;
}

// Block (row): its most likely token and, where it is wanted, the probability.
__global__ __launch_bounds__(kRowThreads, 2) void DraftTokensKernel(DraftShape shape, DraftArrays a,
                                                                    DevicePtr<const int32_t> token_map) {
  const int32_t r = a.requests[blockIdx.x];
  if (r < 0) return;
  const LogitsInMemory row{a.logits + static_cast<int64_t>(blockIdx.x) * shape.vocab_size, shape.vocab_size};
  const Best best = BestOf(row);
  const int64_t draft = a.cu_num_draft[r] + shape.step;
  if (threadIdx.x == 0)
    a.draft_token_ids[draft] = token_map != nullptr && best.token >= 0 ? token_map[best.token] : best.token;
  if (!(a.min_survival[r] >= 0.0f)) return;
  const WeightMeasure measure = WeightingOf(best.max, 1.0f);
  const Amount total = best.token < 0 ? 0 : TotalOf(row, Kept{kLowest, kAllTied}, measure);
  if (threadIdx.x != 0) return;
  const double own = static_cast<double>(WeightMeasure::kOne);
  const float prob = total == 0 ? 0.0f : static_cast<float>(own / static_cast<double>(total));
  a.draft_prob[draft] = prob < shape.min_prob ? 0.0f : prob;
  if (prob < shape.min_prob) a.draft_token_ids[draft] = -1;
}

// Whether the drafts of request r up to this one are so improbable together that no more are wanted.
__device__ bool IsImprobable(const DraftShape& shape, const DraftArrays& a, int32_t r) {
  float survival = 1.0f;
  for (int32_t i = 0; i <= shape.step; ++i) survival = survival * a.draft_prob[a.cu_num_draft[r] + i];
  return survival < a.min_survival[r];
}

// One block: the maps of the next pass.
__global__ __launch_bounds__(kScanThreads) void NextPassKernel(DraftShape shape, DraftArrays a) {
  int32_t num_rows = 0;
  int32_t num_next = 0;
  if (threadIdx.x == 0) a.query_start_loc[0] = 0;
  for (int first = 0; first < shape.num_requests; first += kScanThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    const bool is_request = r < shape.num_requests;
    const int32_t num_wanted = is_request ? static_cast<int32_t>(a.num_wanted[r]) : 0;
    const bool drafts = num_wanted > shape.step;
    const bool ends = drafts && a.min_survival[r] >= 0.0f && IsImprobable(shape, a, r);
    const bool goes_on = num_wanted > shape.step + 1 && !ends;
    int32_t more_rows;
    int32_t more_next;
    const int32_t row = num_rows + BlockRunningSum<kScanThreads>(drafts ? 1 : 0, &more_rows) - 1;
    const int32_t next = num_next + BlockRunningSum<kScanThreads>(goes_on ? 1 : 0, &more_next);
    if (is_request) {
      if (ends) a.num_wanted[r] = shape.step + 1;
      a.query_start_loc[r + 1] = next;
      a.seq_lens[r] = goes_on ? a.num_committed[r] + shape.step + 1 : 0;
    }
    if (goes_on) {
      const int32_t slot = a.num_committed[r] + shape.step;
      const int64_t table_row = a.table_rows[r];
      const int64_t block = a.block_table[table_row * shape.max_blocks + slot / shape.block_size];
      // The row after a draft that could not be made runs token 0.
      a.input_ids[next - 1] = max(a.draft_token_ids[a.cu_num_draft[r] + shape.step], 0);
      a.positions[next - 1] = slot;
      a.slot_mapping[next - 1] = block * shape.block_size + slot % shape.block_size;
      a.sources[next - 1] = row;
    }
    num_rows += more_rows;
    num_next += more_next;
  }
  // Rows that the host made room for store nothing.
  for (int32_t b = num_next + static_cast<int32_t>(threadIdx.x); b < shape.next_room; b += kScanThreads) {
    a.input_ids[b] = 0;
    a.positions[b] = 0;
    a.slot_mapping[b] = -1;
  }
  if (threadIdx.x == 0) a.num_continued[0] = num_next;
}

// Block (row of the next pass): its hidden row.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads, 8) void NextHiddenKernel(int64_t units_per_row, DraftArrays a,
                                                                    DevicePtr<const Unit> hidden, DevicePtr<Unit> y) {
  const int32_t b = static_cast<int32_t>(blockIdx.x);
  if (b >= a.num_continued[0]) return;
  CopyRow(hidden + static_cast<int64_t>(a.sources[b]) * units_per_row, y + b * units_per_row, units_per_row);
}

template <typename Unit>
Error LaunchNextHidden(const MtpPostprocessParams& p, const DraftArrays& arrays, Stream stream) {
  const LaunchShape launch{dim3(static_cast<unsigned>(p.num_next)), dim3(kCopyThreads)};
  return Launch<NextHiddenKernel<Unit>>(launch, stream, p.row_bytes / static_cast<int64_t>(sizeof(Unit)), arrays,
                                        DevicePtr<const Unit>(p.hidden), DevicePtr<Unit>(p.out.hidden));
}

}  // namespace

int64_t MtpPostprocessWorkspaceBytes(const MtpPostprocessParams& p) {
  return (static_cast<int64_t>(p.num_rows) + p.num_next) * static_cast<int64_t>(sizeof(int32_t));
}

Error MtpPostprocess(const MtpPostprocessParams& p, void* workspace, Stream stream) {
  if (p.num_requests < 0 || p.num_rows < 0 || p.num_next < 0) return "sizes: expected no negative number";
  if (p.blocks.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.vocab_size <= 0 || p.vocab_size > kMaxVocabSize) return "vocab_size: expected 1..524288, got another number";
  if (p.step < 0) return "step: expected >= 0, got a negative number";
  if (!(p.drafts.min_prob >= 0.0f && p.drafts.min_prob <= 1.0f))
    return "min_prob: expected a probability, got another number";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  const DraftShape shape{p.num_requests, p.num_rows,        p.num_next,          p.vocab_size,
                         p.step,         p.drafts.min_prob, p.blocks.max_blocks, p.blocks.block_size};
  const auto requests = DevicePtr<int32_t>(workspace);
  const DraftArrays arrays{DevicePtr<const int32_t>(p.table_rows),
                           DevicePtr<const int32_t>(p.num_committed),
                           DevicePtr<const int32_t>(p.cu_num_draft),
                           DevicePtr<const float>(p.min_survival),
                           DevicePtr<const float>(p.logits),
                           DevicePtr<int32_t>(p.num_wanted),
                           DevicePtr<int32_t>(p.drafts.draft_token_ids),
                           DevicePtr<float>(p.drafts.draft_prob),
                           DevicePtr<const int32_t>(p.blocks.block_table),
                           DevicePtr<int32_t>(p.out.input_ids),
                           DevicePtr<int32_t>(p.out.positions),
                           DevicePtr<int64_t>(p.out.slot_mapping),
                           DevicePtr<int32_t>(p.out.query_start_loc),
                           DevicePtr<int32_t>(p.out.seq_lens),
                           DevicePtr<int32_t>(p.out.num_continued),
                           requests,
                           requests + p.num_rows};
  const LaunchShape one_block{dim3(1), dim3(kScanThreads)};
  const LaunchShape per_row{dim3(static_cast<unsigned>(p.num_rows)), dim3(kRowThreads)};
  if (Error error = Launch<DraftingRequestsKernel>(one_block, stream, shape, arrays)) return error;
  if (Error error =
          Launch<DraftTokensKernel>(per_row, stream, shape, arrays, DevicePtr<const int32_t>(p.drafts.token_map)))
    return error;
  if (Error error = Launch<NextPassKernel>(one_block, stream, shape, arrays)) return error;
  const void* const rows[] = {p.hidden, p.out.hidden};
  return WithCopyUnit(p.row_bytes, rows,
                      [&]<typename Unit>(Unit) { return LaunchNextHidden<Unit>(p, arrays, stream); });
}

}  // namespace fdsd::cuda
