#pragma once
// The chip that is emulated, by its generation as __CUDA_ARCH__ / 10, and what it has. Kernels that differ among chips
// ask for it where a compiler for one would know.
//
// Source: CUDA C++ Programming Guide, Technical Specifications per Compute Capability.
#include <cstdint>

namespace fdsd::emulation {

struct Chip {
  int architecture;
  int32_t block_bytes;  // of shared memory that a block may have, static and dynamic together
  int32_t sm_bytes;     // of a multiprocessor
  int32_t sm_threads;
  int32_t sm_blocks;
};

constexpr Chip kChips[] = {
    {75, 64 << 10, 64 << 10, 1024, 16},   {80, 163 << 10, 164 << 10, 2048, 32}, {86, 99 << 10, 100 << 10, 1536, 16},
    {89, 99 << 10, 100 << 10, 1536, 24},  {90, 227 << 10, 228 << 10, 2048, 32}, {100, 227 << 10, 228 << 10, 2048, 32},
    {120, 99 << 10, 100 << 10, 1536, 24},
};
constexpr int32_t kReservedBytes = 1 << 10;  // of shared memory, for each block
constexpr int32_t kRegistersOfSm = 64 << 10;
constexpr int32_t kStaticBytesOfBlock = 48 << 10;  // at most

inline int& Architecture() {
  static int architecture = 90;
  return architecture;
}

// The emulated chip: of another generation than these, the last before it.
inline const Chip& ChipNow() {
  const Chip* found = kChips;
  for (const Chip& chip : kChips) {
    if (chip.architecture <= Architecture()) found = &chip;
  }
  return *found;
}

// Products of warpgroups, which no later chip has; copies of rows past the threads.
inline bool HasWarpgroups() { return Architecture() == 90; }
inline bool HasBulkUnits() { return Architecture() >= 90; }

}  // namespace fdsd::emulation
