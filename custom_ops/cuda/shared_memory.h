#pragma once
#include <cstdint>

namespace fdsd::cuda {

// Shared memory that a kernel may want of a block, static and dynamic together: what chips of sm_80 give (163 KB; those
// of sm_90 and sm_100 give 227). A GPU with less cannot run the kernels: sm_86 and sm_89 give 99 KB.
constexpr int32_t kMaxSharedBytes = 163 * 1024;

}  // namespace fdsd::cuda
