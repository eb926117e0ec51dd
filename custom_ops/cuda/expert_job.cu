#include <numeric>

#include "expert_job.h"
#include "peer_words.h"
#include "row_copy.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ ExpertRankState StateOf(const ExpertGroup& group, int32_t rank) {
  const auto* const state = reinterpret_cast<const volatile int32_t*>(group.states + rank * kRankBytes);
  return static_cast<ExpertRankState>(*state);
}

__device__ __forceinline__ void Fail(const ExpertGroup& group, int32_t rank, ExpertFailure failure) {
  group.state->failed = 1;
  StoreForRank(&group.status->missing, static_cast<uint64_t>(rank));
  StoreForRank(&group.status->failure, static_cast<uint64_t>(failure));
}

// Wait until a rank has done the last job; what one does that is gone matters to who wants results.
__device__ __forceinline__ void AwaitRank(const ExpertGroup& group, int32_t rank, bool wants_results) {
  if (group.state->failed != 0) return;
  const uint64_t seq = group.state->seq;
  const auto* const done = reinterpret_cast<const uint64_t*>(group.done + rank * kDoneBytes);
  uint64_t begin = Nanoseconds();
  for (int look = 1;; ++look) {
    const uint64_t word = LoadFromRank(done);
    if (word / 2 >= seq) {
      if (wants_results && word % 2 != 0) Fail(group, rank, ExpertFailure::kRefused);
      return;
    }
    RestBetweenLooks();
    if (look % kLooksPerCheck != 0) continue;
    const ExpertRankState now = StateOf(group, rank);
    if (LoadFromRank(&group.status->is_aborted) != 0) return Fail(group, rank, ExpertFailure::kAborted);
    if (now == ExpertRankState::kGone) {
      if (wants_results) Fail(group, rank, ExpertFailure::kGone);
      return;
    }
    // One that is being started (again) takes as long as it takes, but a drain does not wait for it.
    const bool is_draining = *const_cast<const volatile int32_t*>(group.is_draining) != 0;
    if (now == ExpertRankState::kLoading && !is_draining) begin = Nanoseconds();
    if (Nanoseconds() - begin >= group.timeout_ns) return Fail(group, rank, ExpertFailure::kLate);
  }
}

// The threads of a block. In the emulation one does the work of all, and there is no barrier.
struct BlockOfThreads {
#if defined(FDSD_EMULATED)
  int32_t thread = 0;
  int32_t count = 1;
  void Meet() const {}
#else
  int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t count = static_cast<int32_t>(blockDim.x);
  __device__ __forceinline__ void Meet() const { __syncthreads(); }
#endif
};

// Say which version of the table the next job is made from, and return it plus 1. Who waits for jobs of older ones has
// raised the version before it looks: it sees this, or this sees that.
__device__ __forceinline__ uint64_t SayVersion(const ExpertGroup& group) {
  for (;;) {
    const uint64_t found = LoadFromRank(group.version) + 1;
    StoreForRank(group.job_version, found);
    FenceForRanks();
    if (LoadFromRank(group.version) + 1 == found) return found;
  }
}

// Note where each rank has the layer's experts, unless that is known.
__device__ __forceinline__ void ReadTable(const ExpertGroup& group, int32_t layer, const BlockOfThreads& block) {
  const int32_t num_places = group.num_ranks * group.num_slots;
  const int32_t num_noted = group.num_experts * group.num_ranks;
  const auto* const table = reinterpret_cast<const volatile int32_t*>(group.table) + int64_t{layer} * num_places;
  int32_t* const slot_of = group.slot_of + int64_t{layer} * num_noted;
  for (;;) {
    if (block.thread == 0) group.state->version = SayVersion(group);
    block.Meet();
    const bool is_known = group.read_versions[layer] == group.state->version;
    block.Meet();
    if (is_known) return;
    for (int32_t i = block.thread; i < num_noted; i += block.count) slot_of[i] = -1;
    block.Meet();
    for (int32_t place = block.thread; place < num_places; place += block.count) {
      const int32_t expert = table[place] - 1;
      if (expert < 0 || expert >= group.num_experts) continue;
      slot_of[expert * group.num_ranks + place / group.num_slots] = place % group.num_slots;
    }
    block.Meet();
    if (block.thread != 0) continue;
    FenceForRanks();
    group.read_versions[layer] = LoadFromRank(group.version) + 1 == group.state->version ? group.state->version : 0;
  }
}

__device__ __forceinline__ void BeginJob(const ExpertGroup& group, int32_t layer, const BlockOfThreads& block) {
  for (int32_t r = block.thread; r < group.num_ranks; r += block.count) {
    AwaitRank(group, r, false);
    const ExpertRankState state = StateOf(group, r);
    const bool serves = state == ExpertRankState::kServing || state == ExpertRankState::kLeaving;
    const Serving found = state == ExpertRankState::kGone ? Serving::kGone : Serving::kLoading;
    group.state->serving[r] = static_cast<int32_t>(serves ? Serving::kServing : found);
  }
  block.Meet();
  if (group.state->failed == 0) ReadTable(group, layer, block);
}

__device__ __forceinline__ void AwaitResults(const ExpertGroup& group, const BlockOfThreads& block) {
  for (int32_t r = block.thread; r < group.num_ranks; r += block.count) AwaitRank(group, r, true);
  block.Meet();
  if (block.thread == 0) StoreForRank(group.job_version, 0);
}

#if !defined(FDSD_EMULATED)
__global__ void BeginExpertsKernel(ExpertGroup group, int32_t layer) { BeginJob(group, layer, {}); }
__global__ void AwaitExpertsKernel(ExpertGroup group) { AwaitResults(group, {}); }
#endif

#if defined(FDSD_EMULATED)
Error BeginExperts(const ExpertGroup& group, int32_t layer, Stream stream) {
  return emulation::Submit(stream, [group, layer]() -> Error {
    BeginJob(group, layer, {});
    return nullptr;
  });
}
#else
Error BeginExperts(const ExpertGroup& group, int32_t layer, Stream stream) {
  return Launch<BeginExpertsKernel>(LaunchShape{dim3(1), dim3(kThreads)}, stream, group, layer);
}
#endif

// The rows of a round, and the experts that they chose. A place is rank * S + slot.
struct Round {
  int32_t layer;
  int32_t num_rows;
  int32_t top_k;
  int32_t num_experts;
  DevicePtr<const int32_t> experts;  // [rows, top_k]
  DevicePtr<int32_t> places;         // [rows, top_k]
  DevicePtr<int32_t> pair_of;        // [rows, top_k]
  DevicePtr<const int32_t> first;    // [R * S + 1] of the pairs of each place
  DevicePtr<const int32_t> slot_of;  // [E, R] of the layer
};

// Thread (row and expert): choose its place. The own rank's, else one of the other ranks that will come, by row, as
// ExpertHome::ChooseSlot does.
__global__ __launch_bounds__(kThreads) void ChoosePlacesKernel(ExpertGroup group, Round round) {
  const int32_t pair = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (pair >= round.num_rows * round.top_k || group.state->failed != 0) return;
  const DevicePtr<const int32_t> slots = round.slot_of + int64_t{round.experts[pair]} * group.num_ranks;
  int32_t rank = group.rank;
  if (slots[rank] < 0) {
    const DevicePtr<const int32_t> serving(group.state->serving);
    int32_t best = 0;
    int32_t count = 0;
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      if (slots[r] < 0 || serving[r] < best) continue;
      count = serving[r] > best ? 1 : count + 1;
      best = serving[r];
    }
    if (count == 0) {
      StoreForRank(&group.status->missing, static_cast<uint64_t>(group.rank));
      StoreForRank(&group.status->failure, static_cast<uint64_t>(ExpertFailure::kNotPublished));
      StoreForRank(&group.state->failed, 1);
      return;
    }
    int32_t left = (pair / round.top_k + group.rank) % count;
    for (rank = 0; slots[rank] < 0 || serving[rank] < best || left-- > 0;) ++rank;
  }
  round.places[pair] = rank * group.num_slots + slots[rank];
}

// Block (row): copy it to where other ranks read it, and write its pairs.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void GiveRowsKernel(ExpertGroup group, Round round, int64_t num_units,
                                                               DevicePtr<const Unit> x) {
  if (group.state->failed != 0) return;
  const int64_t row = blockIdx.x;
  const DevicePtr<Unit> to = DevicePtr<Unit>(reinterpret_cast<Unit*>(group.rows + row * group.row_bytes));
  CopyRow<Unit>(x + row * num_units, to, num_units);
  const DevicePtr<int32_t> pairs(group.pairs);
  for (int32_t k = static_cast<int32_t>(threadIdx.x); k < round.top_k; k += kCopyThreads) {
    const int64_t pair = round.pair_of[row * round.top_k + k];
    pairs[3 * pair] = static_cast<int32_t>(row);
    pairs[3 * pair + 1] = round.places[row * round.top_k + k] % group.num_slots;
    pairs[3 * pair + 2] = round.experts[row * round.top_k + k];
  }
}

// One block: say which pairs are whose, and publish the job, as ExpertSegment::PublishJob does.
__global__ __launch_bounds__(kThreads) void PublishJobKernel(ExpertGroup group, Round round) {
  if (group.state->failed != 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const uint64_t seq = group.state->seq + 1;
  const DevicePtr<int32_t> first_pair(group.first_pair);
  const auto first_of = [&](int32_t rank) { return round.first[rank * group.num_slots]; };
  if (thread <= group.num_ranks) first_pair[thread] = first_of(thread);
  if (thread < group.num_ranks && first_of(thread) == first_of(thread + 1))
    DevicePtr<uint64_t>(reinterpret_cast<uint64_t*>(group.done + thread * kDoneBytes))[0] = 2 * seq;
  const DevicePtr<int64_t> counts(group.counts + int64_t{round.layer} * group.num_experts);
  for (int32_t e = thread; e < round.num_experts; e += kThreads) {
    int32_t count = 0;
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      const int32_t slot = round.slot_of[e * group.num_ranks + r];
      const int32_t place = r * group.num_slots + slot;
      if (slot >= 0) count += round.first[place + 1] - round.first[place];
    }
    counts[e] += count;
  }
  if (thread == 0) {
    DevicePtr<int32_t>(group.layer)[0] = round.layer;
    DevicePtr<int32_t>(group.num_rows)[0] = round.num_rows;
  }
  __syncthreads();
  if (thread != 0) return;
  AboutToPublish(first_pair, group.num_ranks + 1);
  AboutToPublish(DevicePtr<int32_t>(group.pairs), int64_t{3} * round.num_rows * round.top_k);
  AboutToPublish(DevicePtr<uint32_t>(reinterpret_cast<uint32_t*>(group.rows)), round.num_rows * group.row_bytes / 4);
  group.state->seq = seq;
  StoreForRank(group.seq, seq);
}

}  // namespace

Error GiveRound(const ExpertGroup& group, const RoundRows& rows, const RoundArrays& arrays, Stream stream) {
  const int64_t num_noted = int64_t{group.num_experts} * group.num_ranks;
  RouterArrays router{};
  router.experts = arrays.places;
  router.rows = DevicePtr<int32_t>(group.pair_of);
  router.tokens = arrays.tokens;
  router.first = arrays.first;
  RouterShape shape{};
  shape.num_tokens = rows.num_rows;
  shape.top_k = rows.top_k;
  shape.num_local_experts = shape.num_experts = group.num_ranks * group.num_slots;
  const Round round{rows.layer,
                    rows.num_rows,
                    rows.top_k,
                    rows.num_experts,
                    DevicePtr<const int32_t>(rows.expert_ids),
                    arrays.places,
                    router.rows,
                    router.first,
                    DevicePtr<const int32_t>(group.slot_of + rows.layer * num_noted)};
  if (Error error = BeginExperts(group, rows.layer, stream)) return error;
  const int64_t num_pairs = int64_t{rows.num_rows} * rows.top_k;
  const LaunchShape pairs{dim3(static_cast<unsigned>(DivideUp(num_pairs, kThreads))), dim3(kThreads)};
  if (Error error = Launch<ChoosePlacesKernel>(pairs, stream, group, round)) return error;
  if (Error error = NumberPairs(shape, router, stream)) return error;
  const void* const places[] = {rows.x, group.rows};
  const Error error = WithCopyUnit(std::gcd(rows.row_bytes, group.row_bytes), places, [&](auto unit) {
    using Unit = decltype(unit);
    const LaunchShape all{dim3(static_cast<unsigned>(rows.num_rows)), dim3(kCopyThreads)};
    return Launch<GiveRowsKernel<Unit>>(all, stream, group, round, rows.row_bytes / static_cast<int64_t>(sizeof(Unit)),
                                        DevicePtr<const Unit>(rows.x));
  });
  if (error != nullptr) return error;
  return Launch<PublishJobKernel>(LaunchShape{dim3(1), dim3(kThreads)}, stream, group, round);
}

#if defined(FDSD_EMULATED)
Error AwaitExperts(const ExpertGroup& group, Stream stream) {
  return emulation::Submit(stream, [group]() -> Error {
    AwaitResults(group, {});
    return nullptr;
  });
}
#else
Error AwaitExperts(const ExpertGroup& group, Stream stream) {
  return Launch<AwaitExpertsKernel>(LaunchShape{dim3(1), dim3(kMaxExpertRanks)}, stream, group);
}
#endif

}  // namespace fdsd::cuda
