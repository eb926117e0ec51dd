// Drawing a token of every row. The first kernel reads all logits once and keeps little of them. From that a block per
// row decides. It reads the row again only where its filters keep more than the chunks have listed: see
// docs/kernels/sampling.md. The filters are those of the CPU's kernel, on weights that are rounded down to integers,
// 2^44 for the most likely token: their sums are exact, in any order.
#include "fdsd/sampling.h"
#include "ops.h"
#include "sampling_draw.h"

namespace fdsd::cuda {
namespace {

// Of a row that must be read again.
constexpr int32_t kUndecided = -3;

__device__ double UniformOf(const SampledRow& row, const SampleArrays& a) {
  const auto position = static_cast<uint32_t>(static_cast<int32_t>(a.positions[row.index()]));
  return PhiloxNumber(a.seed[row.settings()], position);
}

// What min_p leaves of a row, and of that what has any weight.
__device__ DrawnPart PartOf(const DrawSettings& settings, float max) {
  const float min_p_floor = LogitFloor(max, settings.temperature, log(static_cast<double>(settings.min_p)));
  const float floor = fmaxf(min_p_floor, LightestLogit(max, settings.temperature));
  return DrawnPart{WeightingOf(max, settings.temperature), Kept{floor, kAllTied}, 0};
}

// Draws where the tokens that filters leave are among those that are listed.
__device__ int32_t DrawOfListed(const ListedTokens& listed, const ChunkArrays& chunks, int64_t row,
                                const DrawSettings& settings, DrawnPart part, double u) {
  if (listed.count < 0) return kUndecided;
  const bool has_all = part.kept.floor >= ValueOf(listed.bound);
  if (settings.top_k > 0) {
    const Amount num_kept = TotalOf(listed, part.kept, CountMeasure());
    const auto top_k = static_cast<Amount>(settings.top_k);
    if (!has_all && num_kept < top_k) return kUndecided;
    if (num_kept > top_k) KeepPrefix(listed, CountMeasure(), top_k, &part.kept);
  }
  if (settings.top_k > 0 || has_all) {
    part.total = TotalOf(listed, part.kept, part.measure);
  } else if (settings.WeighsAll()) {
    part.total = TotalOfChunks(WeightsOfChunks(chunks, row, part.measure), chunks.num_chunks);
    if (TotalOf(listed, part.kept, part.measure) < NucleusOf(part, settings.top_p)) return kUndecided;
  } else {
    return kUndecided;
  }
  return DrawPart(listed, part, settings.top_p, u);
}

// Block (row).
__global__ __launch_bounds__(kRowThreads, 2) void SampleKernel(RuleArrays rules, SampleArrays a, ChunkArrays chunks) {
  const SampledRow row(rules, a, static_cast<int64_t>(blockIdx.x));
  const Best best = BestOfChunks(chunks, row.index());
  const DrawSettings settings(a, row);
  int32_t token = best.token;
  if (token >= 0 && settings.temperature > 0.0f) {
    const DrawnPart part = PartOf(settings, best.max);
    const double u = UniformOf(row, a);
    token = settings.HasFilters() ? DrawOfListed(ListRow(chunks, row.index()), chunks, row.index(), settings, part, u)
                                  : DrawOfAll(row, chunks, settings, part.measure, u);
  }
  if (threadIdx.x == 0) a.token_ids[row.index()] = token;
}

// Block (row): one that is undecided.
__global__ __launch_bounds__(kRowThreads, 2) void SampleAgainKernel(RuleArrays rules, SampleArrays a,
                                                                    ChunkArrays chunks) {
  const SampledRow row(rules, a, static_cast<int64_t>(blockIdx.x));
  if (a.token_ids[row.index()] != kUndecided) return;
  const DrawSettings settings(a, row);
  DrawnPart part = PartOf(settings, BestOfChunks(chunks, row.index()).max);
  if (settings.top_k > 0) KeepFirst(row, settings.top_k, &part.kept);
  part.total = TotalOf(row, part.kept, part.measure);
  const int32_t token = DrawPart(row, part, settings.top_p, UniformOf(row, a));
  if (threadIdx.x == 0) a.token_ids[row.index()] = token;
}

// A thread has a request: rows whose draft is not the token of the row that they follow are not drawn.
__global__ __launch_bounds__(kRowThreads) void StopAtWrongDraftsKernel(RuleArrays a, DevicePtr<int32_t> token_ids) {
  constexpr int32_t kNotDrawn = -2;
  const int32_t r = static_cast<int32_t>(blockIdx.x * kRowThreads + threadIdx.x);
  if (r >= a.num_requests) return;
  const int32_t begin = a.cu_num_logits[r];
  const int32_t first_draft = a.cu_num_draft[r];
  for (int32_t row = begin + 1; row < a.cu_num_logits[r + 1]; ++row) {
    const int32_t parent = begin + a.ParentOf(row, begin);
    if (token_ids[parent] != a.draft_token_ids[first_draft + row - begin - 1]) token_ids[row] = kNotDrawn;
  }
}

}  // namespace

int64_t SampleWorkspaceBytes(const SampleParams& p) {
  return static_cast<int64_t>(p.num_rows) * NumChunks(p.vocab_size) * kBytesPerChunk;
}

Error Sample(const SampleParams& p, void* workspace, Stream stream) {
  if (Error error = CheckSampleSizes(p)) return error;
  if (p.stops_at_wrong_draft != 0 && p.drafted.cu_num_logits == nullptr)
    return "drafted: expected the drafts that rows follow where wrong ones stop, got none";
  const RuleArrays rules = RuleArraysOf(p.rules, p.drafted, p.num_requests, p.vocab_size);
  const SampleArrays arrays = SampleArraysOf(p);
  const ChunkArrays chunks = ChunkArraysOf(p, workspace);
  const auto num_rows = static_cast<unsigned>(p.num_rows);
  const LaunchShape per_chunk{dim3(num_rows, static_cast<unsigned>(chunks.num_chunks)), dim3(kRowThreads)};
  if (Error error = Launch<ReadChunksKernel>(per_chunk, stream, rules, arrays, chunks)) return error;
  const LaunchShape per_row{dim3(num_rows), dim3(kRowThreads)};
  if (Error error = Launch<SampleKernel>(per_row, stream, rules, arrays, chunks)) return error;
  if (Error error = Launch<SampleAgainKernel>(per_row, stream, rules, arrays, chunks)) return error;
  if (p.stops_at_wrong_draft == 0) return nullptr;
  const auto num_blocks = static_cast<unsigned>(DivideUp(p.num_requests, kRowThreads));
  return Launch<StopAtWrongDraftsKernel>(LaunchShape{dim3(num_blocks), dim3(kRowThreads)}, stream, rules,
                                         DevicePtr<int32_t>(p.token_ids));
}

}  // namespace fdsd::cuda
