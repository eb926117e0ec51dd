#pragma once
// The generation of chips that is emulated, as __CUDA_ARCH__ / 10: 80, 86, 89, 90, 100. Kernels that differ among them
// ask for it where a compiler for a chip would know.
#include <cstddef>

namespace fdsd::emulation {

inline int& Architecture() {
  static int architecture = 90;
  return architecture;
}

// Shared memory that a block of the chip may have.
inline size_t SharedBytesOfBlock() {
  if (Architecture() == 86 || Architecture() == 89) return 99 << 10;
  return Architecture() < 90 ? 163 << 10 : 227 << 10;
}

}  // namespace fdsd::emulation
