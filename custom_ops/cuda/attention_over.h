#pragma once
// Attention over a cache of one type.
#include "ops.h"

namespace fdsd::cuda {

// What has been checked is launched; defined for float, bf16, half16, int8_t and float8.
template <typename Cached>
Error LaunchOver(const CascadeAppendAttentionParams& p, void* workspace, Stream stream);

}  // namespace fdsd::cuda
