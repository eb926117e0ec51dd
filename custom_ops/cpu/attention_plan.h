#pragma once
// The part of the attention ops that does not depend on the instruction set: argument checks and the list of tasks.
#include "fdsd/attention.h"

namespace fdsd {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroupSize = 16;  // query heads per KV head

// nullptr when the kernels can work on a cache of this geometry.
Error CheckKvCache(const KvCache& cache);

}  // namespace fdsd
