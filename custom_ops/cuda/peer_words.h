#pragma once
// Words that kernels, other GPUs and hosts write and read while all of them run. Kernels that wait for such a word are
// those of a launch of one block, whose work the emulation does on the host: its launches never wait.
#include <cstdint>

#include "device.h"

#if defined(FDSD_EMULATED)
#include <atomic>
#include <chrono>
#endif

namespace fdsd::cuda {

// Polls of a waiting thread between two checks of the clock and of the host's flags, which are across a bus.
constexpr int kLooksPerCheck = 256;

#if defined(FDSD_EMULATED)

inline uint64_t LoadFromRank(const uint64_t* p) { return std::atomic_ref(*const_cast<uint64_t*>(p)).load(); }
inline void StoreForRank(uint64_t* p, uint64_t x) { std::atomic_ref(*p).store(x); }
inline uint64_t Nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline void RestBetweenLooks() { emulation::Rest(); }
// Between a store and a load of different words, which no thread may see the other way round.
inline void FenceForRanks() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// What a kernel is about to publish with a word: the emulation reads it as the thread, so it finds what another thread
// wrote with no barrier between, or another block at all.
template <typename T>
void AboutToPublish(DevicePtr<T> p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<void>(static_cast<T>(p[i]));
}

#else

// Acquire load and release store: who reads a word also sees what was written before it. A release of one thread covers
// what others wrote before a barrier, or before the launch.
__device__ __forceinline__ uint64_t LoadFromRank(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void StoreForRank(uint64_t* p, uint64_t x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void RestBetweenLooks() {}
__device__ __forceinline__ void FenceForRanks() { asm volatile("fence.sc.sys;" ::: "memory"); }
template <typename T>
__device__ __forceinline__ void AboutToPublish(DevicePtr<T>, int64_t) {}

#endif

}  // namespace fdsd::cuda
