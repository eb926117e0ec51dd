#pragma once
// The generation of chips that is emulated, as __CUDA_ARCH__ / 10: 80, 90, 100. Kernels that differ among them ask for
// it where a compiler for a chip would know.
namespace fdsd::emulation {

inline int& Architecture() {
  static int architecture = 90;
  return architecture;
}

}  // namespace fdsd::emulation
