#pragma once
// Prefixes of tokens in their order (higher logit first, then lower id) and by id, without sorting: thresholds are
// found digit by digit. Everything that is summed is an integer, so sums depend on no order.
//
// Tokens lie in a `Row`: row.ForEach(visit) calls visit(logit, token) for all of them, each by one thread of the block.
// All threads call it, in step.
#include "numbers.h"
#include "reduce.h"

namespace fdsd::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;
using Amount = unsigned long long;

// A row of logits in memory.
struct LogitsInMemory {
  DevicePtr<const float> logits;
  int32_t vocab_size;

  template <typename Visit>
  __device__ __forceinline__ void ForEach(const Visit& visit) const {
    // So many loads are under way at a time.
    constexpr int kAtOnce = 8;
    for (int32_t first = threadIdx.x; first < vocab_size; first += kAtOnce * kRowThreads) {
      float loaded[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t token = first + j * kRowThreads;
        if (token < vocab_size) loaded[j] = logits[token];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t token = first + j * kRowThreads;
        if (token < vocab_size) visit(loaded[j], token);
      }
    }
  }
};

// Which tokens are kept: those above `floor`, and those that equal it up to token `last_tied`.
struct Kept {
  float floor;
  int32_t last_tied;

  __device__ __forceinline__ bool Has(float logit, int32_t token) const {
    return logit > floor || (logit == floor && token <= last_tied);
  }
};
constexpr int32_t kAllTied = 0x7fffffff;

// Integers in the order of floats; both zeros have one.
__device__ __forceinline__ uint32_t KeyOf(float x) {
  const uint32_t bits = x == 0.0f ? 0u : __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float ValueOf(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ Amount WarpTotal(Amount x) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// Sum over the block. All threads.
__device__ inline Amount BlockTotal(Amount x) {
  FDSD_SHARED(Amount, totals, kRowWarps);
  x = WarpTotal(x);
  if (threadIdx.x % kWarpSize == 0) totals[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  Amount total = 0;
  for (int warp = 0; warp < kRowWarps; ++warp) total += totals[warp];
  __syncthreads();
  return total;
}

// What kept tokens measure together. `measure` is a function of a logit. All threads.
template <typename Row, typename Measure>
__device__ Amount TotalOf(const Row& row, const Kept& kept, const Measure& measure) {
  Amount total = 0;
  row.ForEach([&](float logit, int32_t token) {
    if (kept.Has(logit, token)) total += measure(logit);
  });
  return BlockTotal(total);
}

// Where a running sum over keys, from the greatest one down, reaches a target.
struct Reached {
  uint32_t key;
  Amount left;    // of the target, after all greater keys
  Amount amount;  // that keys equal to it measure
};

constexpr int kDigits = 256;
constexpr int kDigitBits = 8;
__device__ inline DevicePtr<Amount> DigitAmounts() {
  FDSD_SHARED(Amount, amounts, kDigits);
  return amounts;
}

// The first digit, from the greatest one down, at which the running sum of the amounts reaches the target, or the least
// digit if none does. One warp.
__device__ inline Reached ReachDigit(DevicePtr<const Amount> amounts, Amount target) {
  constexpr int kOwn = kDigits / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int top = kDigits - 1 - lane * kOwn;
  Amount own = 0;
  for (int i = 0; i < kOwn; ++i) own += amounts[top - i];
  Amount running = own;
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const Amount before = __shfl_up_sync(kAllLanes, running, static_cast<unsigned>(lanes));
    if (lane >= lanes) running += before;
  }
  const unsigned reached = __ballot_sync(kAllLanes, running >= target ? 1 : 0);
  const int chosen = reached == 0 ? kWarpSize - 1 : __ffs(static_cast<int>(reached)) - 1;
  Reached found{static_cast<uint32_t>(top), target - (running - own), 0};
  for (int i = 0; i < kOwn - 1 && amounts[found.key] < found.left; ++i) found.left -= amounts[found.key--];
  found.amount = amounts[found.key];
  return Reached{__shfl_sync(kAllLanes, found.key, chosen), __shfl_sync(kAllLanes, found.left, chosen),
                 __shfl_sync(kAllLanes, found.amount, chosen)};
}

// The greatest key at which the running sum, from the greatest one down, reaches the target, 1..the sum of all.
// for_each(add) calls add(key, amount) for what there is, with keys of kBits bits. All threads.
template <int kBits, typename ForEach>
__device__ Reached ReachByDigits(const ForEach& for_each, Amount target) {
  FDSD_SHARED(Amount, found, 3);
  const DevicePtr<Amount> amounts = DigitAmounts();
  Reached reached{0, target, 0};
  for (int shift = kBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int digit = threadIdx.x; digit < kDigits; digit += kRowThreads) amounts[digit] = 0;
    __syncthreads();
    for_each([&](uint32_t key, Amount amount) {
      const bool has_prefix = shift == kBits - kDigitBits || key >> (shift + kDigitBits) == reached.key;
      if (has_prefix && amount > 0) atomicAdd(amounts + (key >> shift & (kDigits - 1)), amount);
    });
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      const Reached digit = ReachDigit(amounts, reached.left);
      if (threadIdx.x == 0) {
        found[0] = static_cast<Amount>(digit.key);
        found[1] = digit.left;
        found[2] = digit.amount;
      }
    }
    __syncthreads();
    reached.key = reached.key << kDigitBits | static_cast<uint32_t>(static_cast<Amount>(found[0]));
    reached.left = found[1];
    reached.amount = found[2];
  }
  return reached;
}

// The first token, by id, at which the running sum of the kept tokens reaches the target, which is 1..TotalOf. All
// threads.
template <typename Row, typename Measure>
__device__ int32_t TokenAt(const Row& row, const Kept& kept, const Measure& measure, Amount target) {
  constexpr int kTokenBits = 24;
  constexpr uint32_t kLast = (1u << kTokenBits) - 1;
  const auto for_each = [&](const auto& add) {
    row.ForEach([&](float logit, int32_t token) {
      if (kept.Has(logit, token)) add(kLast - static_cast<uint32_t>(token), measure(logit));
    });
  };
  return static_cast<int32_t>(kLast - ReachByDigits<kTokenBits>(for_each, target).key);
}

struct CountMeasure {
  __device__ __forceinline__ Amount operator()(float) const { return 1; }
};

// Removes the tokens after the shortest prefix, in the order, that measures the target or more. Returns what the tokens
// that are left measure. The target is 1..TotalOf. All threads.
template <typename Row, typename Measure>
__device__ Amount KeepPrefix(const Row& row, const Measure& measure, Amount target, Kept* kept) {
  const auto for_each = [&](const auto& add) {
    row.ForEach([&](float logit, int32_t token) {
      if (kept->Has(logit, token)) add(KeyOf(logit), measure(logit));
    });
  };
  const Reached reached = ReachByDigits<32>(for_each, target);
  const float floor = ValueOf(reached.key);
  // So many of the tokens with this logit are inside.
  const Amount each = measure(floor);
  const Amount num_inside = (reached.left + each - 1) / each;
  const bool are_all_inside = num_inside * each >= reached.amount;
  const Kept tied{floor, floor == kept->floor ? kept->last_tied : kAllTied};
  kept->last_tied = tied.last_tied;
  if (!are_all_inside) {
    const auto is_equal = [floor](float logit) { return logit == floor ? Amount{1} : Amount{0}; };
    kept->last_tied = TokenAt(row, tied, is_equal, num_inside);
  }
  kept->floor = floor;
  return target - reached.left + (are_all_inside ? reached.amount : num_inside * each);
}

// Removes the tokens after the first k. All threads.
template <typename Row>
__device__ void KeepFirst(const Row& row, int32_t k, Kept* kept) {
  const auto wanted = static_cast<Amount>(k);
  if (TotalOf(row, *kept, CountMeasure()) > wanted) KeepPrefix(row, CountMeasure(), wanted, kept);
}

}  // namespace fdsd::cuda
