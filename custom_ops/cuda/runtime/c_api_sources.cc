// What the library was compiled from, so that one of other sources is not taken for this one, and for which chips. A
// unit of its own: every change compiles it anew, and it is quick.
#include "../../bindings/c_api.h"

// The package's version on the first line, then "path SHA-256" of every source, by its path below custom_ops/.
FDSD_EXPORT const char* fdsd_cuda_sources() {
  static constexpr char text[] =
#include "cuda_sources.inc"
      ;
  return text;
}

// "sm_80, sm_90a": code of these architectures is in it; of the emulated chips, which may be any of them.
FDSD_EXPORT const char* fdsd_cuda_architectures() {
  static constexpr char text[] =
#include "cuda_architectures.inc"
      ;
  return text;
}
