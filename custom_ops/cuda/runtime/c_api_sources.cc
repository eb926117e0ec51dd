// What the library was compiled from, so that one of other sources is not taken for this one. A unit of its own:
// every change compiles it anew, and it is quick.
#include "../../bindings/c_api.h"

// The package's version on the first line, then "path SHA-256" of every source, by its path below custom_ops/.
FDSD_EXPORT const char* fdsd_cuda_sources() {
  static constexpr char text[] =
#include "cuda_sources.inc"
      ;
  return text;
}
