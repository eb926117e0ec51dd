// C functions over the same params structs: ctypes, tests and tools need no framework.
#include "fdsd/fdsd.h"

#define FDSD_EXPORT extern "C" __attribute__((visibility("default")))

#define FDSD_OP(Name, snake) \
  FDSD_EXPORT fdsd::Error fdsd_##snake(const fdsd::Name##Params* p) { return fdsd::Name(*p); }
#include "fdsd/ops.def"
#undef FDSD_OP

FDSD_EXPORT int32_t fdsd_best_isa() { return static_cast<int32_t>(fdsd::BestIsa()); }
FDSD_EXPORT int32_t fdsd_current_isa() { return static_cast<int32_t>(fdsd::CurrentIsa()); }
FDSD_EXPORT fdsd::Error fdsd_set_isa(int32_t isa) {
  if (isa < 0 || isa > 2) return "isa: expected 0 (scalar), 1 (avx2) or 2 (avx512)";
  return fdsd::SetIsa(static_cast<fdsd::Isa>(isa));
}
FDSD_EXPORT int32_t fdsd_num_threads() { return fdsd::NumThreads(); }
FDSD_EXPORT fdsd::Error fdsd_set_num_threads(int32_t num_threads) { return fdsd::SetNumThreads(num_threads); }
