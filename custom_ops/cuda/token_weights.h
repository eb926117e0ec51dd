#pragma once
// The order of a row's tokens as integers, the best of them, and the weights of all.
#include "logits_prefix.h"

namespace fdsd::cuda {

constexpr float kLowest = -3.402823466e38f;

// A token's place in the order: logit above, id below, so that more comes earlier.
__device__ __forceinline__ Amount PlaceOf(float logit, int32_t token) {
  return static_cast<Amount>(KeyOf(logit)) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int32_t TokenOf(Amount place) { return static_cast<int32_t>(~static_cast<uint32_t>(place)); }
__device__ __forceinline__ float LogitOf(Amount place) { return ValueOf(static_cast<uint32_t>(place >> 32)); }
// More than any place where there is NaN or +inf.
constexpr Amount kBroken = ~Amount{0};

struct Best {
  float max;
  int32_t token;  // -1 for a row with NaN or +inf, or without any finite logit
};

__device__ __forceinline__ Best BestAt(Amount place) {
  const float max = LogitOf(place);
  return place == kBroken || !(max >= kLowest) ? Best{0.0f, -1} : Best{max, TokenOf(place)};
}

// The first of a thread's tokens in the order: Look at them by id.
class OwnBest {
 public:
  __device__ __forceinline__ void Look(float logit, int32_t token) {
    if (!(logit <= -kLowest)) is_broken_ = true;
    if (token_ >= 0 && !(logit > max_)) return;
    max_ = logit;
    token_ = token;
  }
  // 0 where it had no token.
  __device__ __forceinline__ Amount place() const {
    if (is_broken_) return kBroken;
    return token_ < 0 ? 0 : PlaceOf(max_, token_);
  }

 private:
  float max_ = 0.0f;
  int32_t token_ = -1;
  bool is_broken_ = false;
};

__device__ __forceinline__ Amount WarpGreatest(Amount place) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    const Amount other = __shfl_xor_sync(kAllLanes, place, lanes);
    if (other > place) place = other;
  }
  return place;
}

// The greatest place of the block's threads. All threads.
__device__ inline Amount BlockBest(Amount place) {
  FDSD_SHARED(Amount, bests, kRowWarps);
  place = WarpGreatest(place);
  if (threadIdx.x % kWarpSize == 0) bests[threadIdx.x / kWarpSize] = place;
  __syncthreads();
  for (int warp = 0; warp < kRowWarps; ++warp) {
    const Amount other = bests[warp];
    if (other > place) place = other;
  }
  __syncthreads();
  return place;
}

// The first token in the order. All threads of the block.
template <typename Row>
__device__ Best BestOf(const Row& row) {
  OwnBest own;
  row.ForEach([&](float logit, int32_t token) { own.Look(logit, token); });
  return BestAt(BlockBest(own.place()));
}

// So many tokens of the greatest weight have a sum of 63 bits.
constexpr int32_t kMaxVocabSize = 1 << 19;

// A token's weight, exp((logit - max) / temperature), as an integer. Source of the polynomial: Taylor's, of 2^f.
struct WeightMeasure {
  float max;
  float scale;  // log2(e) / temperature

  static constexpr float kOne = 17592186044416.0f;  // 2^44: 2^19 tokens fit into 63 bits
  static constexpr int kOneBits = 44;

  __device__ __forceinline__ Amount operator()(float logit) const {
    const float depth = logit - max;
    const float n = rintf(depth * scale);
    const float f = fmaf(depth, scale, -n);
    float y = 1.54035304e-4f;
    y = fmaf(y, f, 1.33335581e-3f);
    y = fmaf(y, f, 9.61812911e-3f);
    y = fmaf(y, f, 5.55041087e-2f);
    y = fmaf(y, f, 2.40226507e-1f);
    y = fmaf(y, f, 6.93147181e-1f);
    y = fmaf(y, f, 1.0f);
    if (!(n >= -126.0f)) return 0;
    return static_cast<Amount>(y * __uint_as_float(static_cast<unsigned>(static_cast<int>(n) + 127) << 23) * kOne);
  }
};

__device__ inline WeightMeasure WeightingOf(float max, float temperature) {
  constexpr double kLog2E = 1.4426950408889634;
  const double scale = kLog2E / static_cast<double>(temperature);
  return WeightMeasure{max, static_cast<float>(fmin(scale, 3.4028234663852886e38))};
}

// The smallest float x with x >= max + temperature * log_ratio.
__device__ inline float LogitFloor(float max, float temperature, double log_ratio) {
  const double exact = static_cast<double>(max) + static_cast<double>(temperature) * log_ratio;
  if (exact < static_cast<double>(kLowest)) return kLowest;
  const auto near = static_cast<float>(exact);
  return static_cast<double>(near) >= exact ? near : nextafterf(near, INFINITY);
}

// Below it a logit's weight is no integer above 0, or its depth no float.
__device__ inline float LightestLogit(float max, float temperature) {
  constexpr double kLightest = -87.0;
  const auto deepest = static_cast<float>(static_cast<double>(max) + static_cast<double>(kLowest));
  return fmaxf(LogitFloor(max, temperature, kLightest), deepest);
}

}  // namespace fdsd::cuda
