#pragma once
// Runs a kernel's source on the CPU: blocks one after the other, the threads of a block as fibers that change places
// where they wait for one another. One launch at a time in a process.
#include <cstdint>
#include <functional>
#include <source_location>

#include "fdsd/status.h"

namespace fdsd::emulation {

struct Index3 {
  unsigned x, y, z;
};

// CUDA's dim3.
struct Size3 {
  unsigned x, y, z;
  constexpr Size3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Where the running thread is. `order` says which of its accesses come before which of others', see Check.
struct ThreadPlace {
  Index3 thread_idx;
  Index3 block_idx;
  Size3 block_dim;
  Size3 grid_dim;
  uint32_t linear;        // index of the thread in its block
  uint32_t launch_begin;  // the first period of the launch, of the block, and the one that runs: they are numbered
  uint32_t block_begin;   // through, and __syncthreads ends one
  uint32_t period;
  uint32_t warp_period;  // of the thread's warp within `period`; __syncwarp ends one
};
extern ThreadPlace place_now;
inline const ThreadPlace& Here() { return place_now; }

// End the launch with this error; does not return. Only in a kernel.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Wait until all threads of the block are here. Fails where others wait elsewhere or have ended.
void WaitForBlock(std::source_location where);
// Wait until all lanes of the warp are here, each with up to 64 bytes; returns the lanes' bytes, 64 apart, which stay
// until the warp has met twice more. `orders_memory`: whether what was written before is seen by the others after.
const uint64_t* MeetWarp(unsigned mask, const void* bytes, int32_t num_bytes, bool orders_memory,
                         std::source_location where);
constexpr int kWordsPerLane = 8;
// Let the others run, each up to where it waits; then the running thread goes on.
void LeaveThread();

// Why a device would not launch the kernel, with `name` before it; nullptr if it would.
Error LaunchRefusal(const char* name, Size3 grid, Size3 block, int32_t dynamic_bytes);

// Run body for every thread. `name` is put before an error.
Error RunKernel(const char* name, Size3 grid, Size3 block, int32_t dynamic_bytes, const std::function<void()>& body);

// Seen by no test of an op, so counted: launches since the process began.
int64_t NumLaunches();

}  // namespace fdsd::emulation
