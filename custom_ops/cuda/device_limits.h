#pragma once
// What a device gives its blocks, and how many stages of copies a kernel may have on their way there. Tiles and stages
// are chosen by these numbers alone, not by a device's name or generation.
#include <algorithm>
#include <initializer_list>

#include "device.h"

namespace fdsd::cuda {

// That every multiprocessor has, by which __launch_bounds__ limits those of a thread.
constexpr int32_t kRegisters = 64 * 1024;

struct DeviceLimits {
  int32_t block_bytes;     // of shared memory, at most
  int32_t sm_bytes;        // that all blocks of a multiprocessor share
  int32_t reserved_bytes;  // that each of them has for the driver
  int32_t sm_threads;
  int32_t sm_blocks;
  int32_t sm_registers;
};

// Of the current device; zeros where there is none.
inline DeviceLimits LimitsOfDevice() {
  int device = 0;
  DeviceLimits limits{};
  if (cudaGetDevice(&device) != cudaSuccess) return limits;
  const auto read = [device](cudaDeviceAttr attribute, int32_t* value) {
    if (cudaDeviceGetAttribute(value, attribute, device) != cudaSuccess) *value = 0;
  };
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits.block_bytes);
  read(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &limits.sm_bytes);
  read(cudaDevAttrReservedSharedMemoryPerBlock, &limits.reserved_bytes);
  read(cudaDevAttrMaxThreadsPerMultiProcessor, &limits.sm_threads);
  read(cudaDevAttrMaxBlocksPerMultiprocessor, &limits.sm_blocks);
  read(cudaDevAttrMaxRegistersPerMultiprocessor, &limits.sm_registers);
  return limits;
}

// What a kernel asks for.
struct BlockNeeds {
  int32_t threads;
  int32_t min_blocks;  // of a multiprocessor, as __launch_bounds__ says: registers of a thread are few enough for them
};

// Blocks of a kernel that a multiprocessor has at a time, each with so much shared memory; 0 = none can start. At most
// as many as its registers are limited for.
inline int32_t BlocksOfSm(const DeviceLimits& limits, const BlockNeeds& needs, int64_t shared_bytes) {
  if (shared_bytes > limits.block_bytes) return 0;
  const auto by_bytes = static_cast<int32_t>(limits.sm_bytes / (shared_bytes + limits.reserved_bytes));
  const int32_t by_registers = limits.sm_registers / (kRegisters / needs.min_blocks);
  return std::min({needs.min_blocks, by_bytes, by_registers, limits.sm_threads / needs.threads, limits.sm_blocks});
}

// The first of these numbers of stages, which fall, that leaves room for the most blocks. A block that has one stage
// only waits for each copy, so that is for where two have no room at all. 0 = not even the last has room.
template <typename BytesOf>
int32_t StagesOf(const DeviceLimits& limits, const BlockNeeds& needs, std::initializer_list<int32_t> counts,
                 const BytesOf& shared_bytes) {
  int32_t most_blocks = 0;
  int32_t found = 0;
  for (const int32_t count : counts) {
    if (count == 1 && found > 0) break;
    const int32_t num_blocks = BlocksOfSm(limits, needs, shared_bytes(count));
    if (num_blocks <= most_blocks) continue;
    most_blocks = num_blocks;
    found = count;
  }
  return found;
}

constexpr Error kNoSharedMemory = "shared memory: expected a GPU that gives a block 99 KB, got one that gives less";

}  // namespace fdsd::cuda
