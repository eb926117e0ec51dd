#pragma once
// What every device asks of a KV cache.
#include "fdsd/kv_cache.h"

namespace fdsd {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxLatentDim = 640;  // of a cache whose keys are its values
constexpr int kMaxKvHeads = 1024;

// nullptr when a cache has this geometry and its scales; its activations may be of any type.
Error CheckKvStorage(const KvCache& cache);
// nullptr when kernels can work on a cache of this geometry.
Error CheckKvCache(const KvCache& cache);

}  // namespace fdsd
