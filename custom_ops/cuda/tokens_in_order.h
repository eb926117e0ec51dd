#pragma once
// Lists of a row's best tokens.
#include "token_weights.h"

namespace fdsd::cuda {

// Tokens of a row that are listed together, at most so many.
constexpr int32_t kRowListed = 2048;

// The tokens of a row from a bound on, where it is known that these are all.
struct ListedTokens {
  DevicePtr<const Amount> places;
  int32_t count;  // -1 = they are too many, or not known
  uint32_t bound;

  template <typename Visit>
  __device__ __forceinline__ void ForEach(const Visit& visit) const {
    for (int32_t i = threadIdx.x; i < count; i += kRowThreads) {
      const Amount place = places[i];
      visit(LogitOf(place), TokenOf(place));
    }
  }
};

// Finds the order of the kept tokens: calls write(i, place) for each, where i tokens come before it. `list` is the
// row's own memory with room for all of them. Every token is compared with every other: for lists of some tens. All
// threads of the block; other threads see what one writes after the next barrier.
template <typename Row, typename Write>
__device__ void ListKept(const Row& row, const Kept& kept, DevicePtr<Amount> list, const Write& write) {
  FDSD_SHARED(int32_t, num_listed, 1);
  if (threadIdx.x == 0) num_listed[0] = 0;
  __syncthreads();
  row.ForEach([&](float logit, int32_t token) {
    if (kept.Has(logit, token)) list[atomicAdd(num_listed + 0, 1)] = PlaceOf(logit, token);
  });
  __syncthreads();
  const int32_t count = num_listed[0];
  for (int32_t i = threadIdx.x; i < count; i += kRowThreads) {
    const Amount own = list[i];
    int32_t num_before = 0;
    for (int32_t other = 0; other < count; ++other) num_before += list[other] > own ? 1 : 0;
    write(num_before, own);
  }
}

}  // namespace fdsd::cuda
