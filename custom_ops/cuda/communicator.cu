#include <array>
#include <atomic>
#include <memory>

#include "communicator.h"
#if defined(FDSD_EMULATED)
#include <chrono>
#include <thread>
#endif

#include "../bindings/c_api.h"

namespace fdsd::cuda {
namespace {

constexpr int32_t kMaxGroups = 64;
std::array<std::atomic<RankGroup*>, kMaxGroups> groups;

#if !defined(FDSD_EMULATED)

// Looks at a word of another rank's, with what it wrote before; and tells it.
__device__ __forceinline__ uint32_t LoadFromRank(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void StoreForRank(uint32_t* p, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// A thread has a rank.
__global__ void MeetRanksKernel(RankGroup group) {
  constexpr uint64_t kTimeout = 120'000'000'000;
  const int other = static_cast<int>(threadIdx.x);
  RankSignals* const own = group.signals[group.rank];
  const uint32_t epoch = own->epoch + 1;
  __syncwarp();
  if (other == 0) own->epoch = epoch;
  if (other >= group.size) return;
  StoreForRank(group.signals[other]->arrived + group.rank, epoch);
  const uint64_t begin = Nanoseconds();
  // Numbers go round.
  while (static_cast<int32_t>(LoadFromRank(own->arrived + other) - epoch) < 0) {
    if (Nanoseconds() - begin < kTimeout) continue;
    own->has_failed = 1;
    return;
  }
}

#endif

}  // namespace

const RankGroup* FindRankGroup(int32_t handle) {
  return handle >= 1 && handle <= kMaxGroups ? groups[static_cast<size_t>(handle - 1)].load() : nullptr;
}

#if defined(FDSD_EMULATED)

Error MeetRanks(const RankGroup& group, Stream stream) {
  if (stream != nullptr) return "stream: expected none where ranks are emulated, as a launch would wait for another";
  constexpr std::chrono::seconds kTimeout(120);
  RankSignals* const own = group.signals[group.rank];
  const uint32_t epoch = ++own->epoch;
  for (int32_t r = 0; r < group.size; ++r)
    std::atomic_ref(group.signals[r]->arrived[group.rank]).store(epoch, std::memory_order_release);
  const auto begin = std::chrono::steady_clock::now();
  for (int32_t r = 0; r < group.size; ++r) {
    while (static_cast<int32_t>(std::atomic_ref(own->arrived[r]).load(std::memory_order_acquire) - epoch) < 0) {
      if (std::chrono::steady_clock::now() - begin > kTimeout) return "a rank did not come in time";
      std::this_thread::yield();
    }
  }
  return nullptr;
}

#else

Error MeetRanks(const RankGroup& group, Stream stream) {
  return Launch<MeetRanksKernel>(LaunchShape{dim3(1), dim3(kWarpSize)}, stream, group);
}

#endif

}  // namespace fdsd::cuda

// Open a rank's end of a group; `buffers` and `signals` are `size` addresses each, as RankGroup says. The handle is
// what AllReduceParams takes. The memory stays the caller's.
FDSD_EXPORT fdsd::Error fdsd_cuda_open_ranks(int32_t rank, int32_t size, int64_t buffer_bytes, void* const* buffers,
                                             void* const* signals, int32_t* handle) {
  using namespace fdsd::cuda;
  if (size != 2 && size != fdsd::kMaxRanks) return "size: expected 2 or 4 ranks, got another number";
  if (rank < 0 || rank >= size) return "rank: expected one of the group's, got another";
  if (buffer_bytes < 16 || buffer_bytes % 16 != 0)
    return "buffer_bytes: expected a positive multiple of 16, got another";
  auto group = std::make_unique<RankGroup>();
  *group = RankGroup{rank, size, buffer_bytes, {}, {}};
  for (int32_t r = 0; r < size; ++r) {
    group->buffers[r] = static_cast<char*>(buffers[r]);
    group->signals[r] = static_cast<RankSignals*>(signals[r]);
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

// Bytes of the memory for a rank's signals.
FDSD_EXPORT int64_t fdsd_cuda_rank_signals_bytes() { return sizeof(fdsd::cuda::RankSignals); }
