#pragma once
// CUDA's names as the emulation has them. Only what kernels use is here; the rest does not compile.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulation/architecture.h"
#include "emulation/bulk_copies.h"
#include "emulation/copies.h"
#include "emulation/cuda_api.h"
#include "emulation/engine.h"
#include "emulation/memory.h"
#include "emulation/warpgroup.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (::fdsd::emulation::Here().thread_idx)
#define blockIdx (::fdsd::emulation::Here().block_idx)
#define blockDim (::fdsd::emulation::Here().block_dim)
#define gridDim (::fdsd::emulation::Here().grid_dim)

using dim3 = fdsd::emulation::Size3;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  fdsd::emulation::WaitForBlock(where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, std::source_location where = std::source_location::current()) {
  fdsd::emulation::MeetWarp(mask, nullptr, 0, true, where);
}

namespace fdsd::emulation {

template <typename T>
T FromLane(const uint64_t* lanes, unsigned lane) {
  T value;
  std::memcpy(static_cast<void*>(&value), lanes + lane * kWordsPerLane, sizeof(T));
  return value;
}
inline unsigned Lane() { return Here().linear % 32; }

}  // namespace fdsd::emulation

// Shuffles move values and order no memory, as on the device.
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, std::source_location where = std::source_location::current()) {
  using namespace fdsd::emulation;
  return FromLane<T>(MeetWarp(mask, &value, sizeof(T), false, where), static_cast<unsigned>(lane) % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, std::source_location where = std::source_location::current()) {
  using namespace fdsd::emulation;
  return FromLane<T>(MeetWarp(mask, &value, sizeof(T), false, where), Lane() ^ static_cast<unsigned>(lanes));
}
// The value of `delta` lanes before; its own where there is none.
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, std::source_location where = std::source_location::current()) {
  using namespace fdsd::emulation;
  const uint64_t* lanes = MeetWarp(mask, &value, sizeof(T), false, where);
  return FromLane<T>(lanes, Lane() >= delta ? Lane() - delta : Lane());
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              std::source_location where = std::source_location::current()) {
  using namespace fdsd::emulation;
  const uint64_t* lanes = MeetWarp(mask, &predicate, sizeof(int), false, where);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) ballot |= (FromLane<int>(lanes, lane) != 0 ? 1u : 0u) << lane;
  return ballot;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value,
                                  std::source_location where = std::source_location::current()) {
  using namespace fdsd::emulation;
  const uint64_t* lanes = MeetWarp(mask, &value, sizeof(value), false, where);
  unsigned greatest = 0;
  for (unsigned lane = 0; lane < 32; ++lane) greatest = std::max(greatest, FromLane<unsigned>(lanes, lane));
  return greatest;
}

template <typename T>
T atomicAdd(fdsd::emulation::Checked<T> p, T value) {
  fdsd::emulation::Check(p.allocation(), p.address(), sizeof(T), fdsd::emulation::Access::kAtomic);
  const T before = *p.address();
  *p.address() = before + value;
  return before;
}
template <typename T>
T atomicMax(fdsd::emulation::Checked<T> p, T value) {
  fdsd::emulation::Check(p.allocation(), p.address(), sizeof(T), fdsd::emulation::Access::kAtomic);
  const T before = *p.address();
  if (value > before) *p.address() = value;
  return before;
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
