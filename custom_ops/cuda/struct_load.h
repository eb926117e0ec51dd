#pragma once
#include "device.h"

namespace fdsd::cuda {

// Element i of an array of structs of 8-byte words, which are larger than one access.
template <typename T>
__device__ __forceinline__ T LoadStruct(DevicePtr<const T> structs, int64_t i) {
  union {
    T value;
    uint64_t words[sizeof(T) / 8];
  } loaded;
  const DevicePtr<const uint64_t> words = ViewAs<const uint64_t>(structs + i);
  for (int w = 0; w < static_cast<int>(sizeof(T) / 8); ++w) loaded.words[w] = words[w];
  return loaded.value;
}

}  // namespace fdsd::cuda
