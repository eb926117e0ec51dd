#pragma once
// Copies of whole rows to shared memory that the memory engine makes (cp.async.bulk), and barriers that count their
// bytes (mbarrier). Hopper and later have these instructions; the emulation has a stand-in of each.
//
// A barrier is for one expectation at a time: a thread says how many bytes come, and copies that name the barrier bring
// them. Threads that wait see them then. Phases are numbered from 0, and a wait names its phase's last bit.
#include "device.h"

namespace fdsd::cuda {

using BulkBarrier = uint64_t;

#if defined(FDSD_EMULATED)

inline bool HasBulkCopies() { return emulation::HasBulkUnits(); }

// One thread, before any other touches the barriers; FenceBulkBarriers and a block's barrier follow.
inline void InitBulkBarrier(DevicePtr<BulkBarrier> barrier) {
  emulation::InitBarrier(barrier.allocation(), barrier.address());
}
inline void FenceBulkBarriers() { emulation::FenceBarriers(); }

// So many bytes come in the phase that begins.
inline void ExpectBytes(DevicePtr<BulkBarrier> barrier, int num_bytes) {
  emulation::ExpectBytes(barrier.allocation(), barrier.address(), num_bytes);
}

// What the thread wrote or read, and what others did before a barrier between, comes before bulk copies to the same
// shared memory.
inline void FenceBulkWrites() { emulation::FenceProxies(); }

// Copy num_bytes to shared memory while the thread goes on. Both addresses and num_bytes are multiples of 16.
inline void CopyBulk(DevicePtr<uint8_t> to, DevicePtr<const uint8_t> from, int num_bytes,
                     DevicePtr<BulkBarrier> barrier) {
  emulation::StartBulkCopy(to.allocation(), to.address(), from.allocation(), from.address(), num_bytes,
                           barrier.allocation(), barrier.address());
}

// Wait until all bytes of the phase are there.
inline void WaitForBytes(DevicePtr<BulkBarrier> barrier, uint32_t phase_bit) {
  emulation::WaitForBytes(barrier.allocation(), barrier.address(), phase_bit);
}

#else

__device__ __forceinline__ constexpr bool HasBulkCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void InitBulkBarrier(BulkBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ __forceinline__ void FenceBulkBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void ExpectBytes(BulkBarrier* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void FenceBulkWrites() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void CopyBulk(uint8_t* to, const uint8_t* from, int num_bytes, BulkBarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(num_bytes), "r"(SharedAddress(barrier))
               : "memory");
}
__device__ __forceinline__ void WaitForBytes(BulkBarrier* barrier, uint32_t phase_bit) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::
          "r"(SharedAddress(barrier)),
      "r"(phase_bit)
      : "memory");
}

#else  // never called

__device__ __forceinline__ void InitBulkBarrier(BulkBarrier*) {}
__device__ __forceinline__ void FenceBulkBarriers() {}
__device__ __forceinline__ void ExpectBytes(BulkBarrier*, int) {}
__device__ __forceinline__ void FenceBulkWrites() {}
__device__ __forceinline__ void CopyBulk(uint8_t*, const uint8_t*, int, BulkBarrier*) {}
__device__ __forceinline__ void WaitForBytes(BulkBarrier*, uint32_t) {}

#endif
#endif

}  // namespace fdsd::cuda
