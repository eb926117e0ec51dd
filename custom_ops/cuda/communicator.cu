#include <array>
#include <atomic>
#include <memory>

#include "../bindings/c_api.h"
#include "communicator.h"
#include "peer_words.h"

namespace fdsd::cuda {
namespace {

constexpr int32_t kMaxGroups = 64;
std::array<std::atomic<RankGroup*>, kMaxGroups> groups;
__host__ __device__ constexpr uint64_t FailedIn(uint64_t epoch) { return (epoch >> 32) + 1; }

__device__ __forceinline__ bool HasFailed(const RankGroup& group, uint64_t epoch) {
  bool has_failed = LoadFromRank(&group.flags->is_aborted) != 0;
  for (int32_t r = 0; r < group.size; ++r) has_failed |= LoadFromRank(group.flags->failed_in + r) == FailedIn(epoch);
  return has_failed;
}

// Wait until another rank has come to the epoch, or give up for good.
__device__ __forceinline__ void WaitForRank(const RankGroup& group, int32_t other, uint64_t epoch) {
  RankSignals* const own = group.signals[group.rank];
  if (own->failed_in == FailedIn(epoch)) return;
  const uint64_t begin = Nanoseconds();
  for (int look = 1; LoadFromRank(own->arrived + other) < epoch; ++look) {
    RestBetweenLooks();
    if (look % kLooksPerCheck != 0) continue;
    if (!HasFailed(group, epoch) && Nanoseconds() - begin < group.timeout_ns) continue;
    own->failed_in = FailedIn(epoch);
    StoreForRank(&group.status->missing, static_cast<uint64_t>(other));
    StoreForRank(&group.status->failed_in, FailedIn(epoch));
    return;
  }
}

#if !defined(FDSD_EMULATED)

// A thread has a rank.
__global__ void MeetRanksKernel(RankGroup group) {
  const int other = static_cast<int>(threadIdx.x);
  RankSignals* const own = group.signals[group.rank];
  const uint64_t epoch = own->epoch + 1;
  __syncwarp();
  if (other == 0) own->epoch = epoch;
  if (other >= group.size) return;
  StoreForRank(group.signals[other]->arrived + group.rank, epoch);
  WaitForRank(group, other, epoch);
}

#endif

__global__ void BeginAttemptKernel(uint64_t epoch, DevicePtr<uint64_t> own) {
  if (threadIdx.x == 0) own[0] = epoch;
}

}  // namespace

const RankGroup* FindRankGroup(int32_t handle) {
  return handle >= 1 && handle <= kMaxGroups ? groups[static_cast<size_t>(handle - 1)].load() : nullptr;
}

#if defined(FDSD_EMULATED)

Error MeetRanks(const RankGroup& group, Stream stream) {
  return emulation::Submit(stream, [group]() -> Error {
    const uint64_t epoch = ++group.signals[group.rank]->epoch;
    for (int32_t r = 0; r < group.size; ++r) StoreForRank(group.signals[r]->arrived + group.rank, epoch);
    for (int32_t r = 0; r < group.size; ++r) WaitForRank(group, r, epoch);
    return nullptr;
  });
}

#else

Error MeetRanks(const RankGroup& group, Stream stream) {
  return Launch<MeetRanksKernel>(LaunchShape{dim3(1), dim3(kWarpSize)}, stream, group);
}

#endif

Error BeginAttempt(const RankGroup& group, int64_t attempt, Stream stream) {
  if (attempt < 0 || attempt > INT32_MAX) return "attempt: expected a number up to 2^31 - 1, got another";
  return Launch<BeginAttemptKernel>(LaunchShape{dim3(1), dim3(kWarpSize)}, stream, static_cast<uint64_t>(attempt) << 32,
                                    DevicePtr<uint64_t>(&group.signals[group.rank]->epoch));
}

}  // namespace fdsd::cuda

// Open a rank's end of a group. The handle is what collective ops take; all memory stays the caller's.
//   timeout_s        seconds that a rank waits for another in an exchange
//   memory           [size] of every rank: fdsd_cuda_rank_memory_bytes(buffer_bytes), zeros at first
//   flags, status    see RankGroup; of pinned or registered memory, by the GPU's addresses
FDSD_EXPORT fdsd::Error fdsd_cuda_open_ranks(int32_t rank, int32_t size, int64_t buffer_bytes, double timeout_s,
                                             void* const* memory, const void* flags, void* status, int32_t* handle) {
  using namespace fdsd::cuda;
  if (size != 2 && size != fdsd::kMaxRanks) return "size: expected 2 or 4 ranks, got another number";
  if (rank < 0 || rank >= size) return "rank: expected one of the group's, got another";
  if (buffer_bytes < 16 || buffer_bytes % 16 != 0)
    return "buffer_bytes: expected a positive multiple of 16, got another";
  if (!(timeout_s > 0 && timeout_s <= 1e6)) return "timeout_s: expected a positive number up to 1e6, got another";
  auto group = std::make_unique<RankGroup>();
  *group = RankGroup{rank, size, buffer_bytes, static_cast<uint64_t>(timeout_s * 1e9), {}, {}, nullptr, nullptr};
  group->flags = static_cast<const fdsd::GroupFlags*>(flags);
  group->status = static_cast<RankStatus*>(status);
  for (int32_t r = 0; r < size; ++r) {
    group->signals[r] = static_cast<RankSignals*>(memory[r]);
    group->buffers[r] = static_cast<char*>(memory[r]) + kSignalsBytes;
  }
  for (*handle = 1; *handle <= kMaxGroups; ++*handle) {
    RankGroup* empty = nullptr;
    if (!groups[static_cast<size_t>(*handle - 1)].compare_exchange_strong(empty, group.get())) continue;
    group.release();
    return nullptr;
  }
  return "groups: expected at most 64 open ones, got one more";
}

// Nothing of it may be under way.
FDSD_EXPORT void fdsd_cuda_close_ranks(int32_t handle) {
  if (fdsd::cuda::FindRankGroup(handle) != nullptr)
    delete fdsd::cuda::groups[static_cast<size_t>(handle - 1)].exchange(nullptr);
}

FDSD_EXPORT fdsd::Error fdsd_cuda_begin_attempt(int32_t handle, int64_t attempt, void* stream) {
  const fdsd::cuda::RankGroup* const group = fdsd::cuda::FindRankGroup(handle);
  if (group == nullptr) return "communicator: expected an open one, got another";
  return fdsd::cuda::BeginAttempt(*group, attempt, stream);
}

// Of what a rank shares with the others.
FDSD_EXPORT int64_t fdsd_cuda_rank_memory_bytes(int64_t buffer_bytes) {
  return fdsd::cuda::kSignalsBytes + 2 * buffer_bytes;
}

// What one exchange should carry. The emulation's are small, so that a tiny model's take several.
FDSD_EXPORT int64_t fdsd_cuda_rank_buffer_bytes() {
#if defined(FDSD_EMULATED)
  return 64 << 10;
#else
  return 16 << 20;
#endif
}
