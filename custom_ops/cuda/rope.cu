#include "fdsd/attention.h"
#include "kv_layout.h"
#include "numbers.h"
#include "ops.h"
#include "reduce.h"
#include "rope_heads.h"

namespace fdsd::cuda {
namespace {

// A warp has a head of a token.
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

struct RopeShape {
  KvShape cache;
  int32_t num_heads;
  int32_t rotary_dim;
  int32_t interleaved;
  float norm_eps;
};

struct RopeArrays {
  DevicePtr<const int32_t> positions;
  DevicePtr<const int64_t> slot_mapping;
  DevicePtr<const float> cos_sin;
  DevicePtr<const float> q_scale;
  DevicePtr<const float> q_norm;
  DevicePtr<const float> k_norm;
  DevicePtr<float> k_scale;
  DevicePtr<float> v_scale;
};

// The warp's vector times 1 / its root mean square and weight.
__device__ void NormHead(int32_t head_dim, float eps, DevicePtr<const float> weight, DevicePtr<float> head) {
  const int lane = threadIdx.x % kWarpSize;
  float squares = 0.0f;
  for (int d = lane; d < head_dim; d += kWarpSize) {
    const float x = head[d];
    squares = fmaf(x, x, squares);
  }
  const float scale = 1.0f / sqrtf(WarpSum(squares) / static_cast<float>(head_dim) + eps);
  for (int d = lane; d < head_dim; d += kWarpSize) head[d] = head[d] * scale * weight[d];
  __syncwarp();
}

// Pairs of elements turn by the angles of a position, whose cosines and sines begin at cos_sin.
__device__ void RotateHead(const RopeShape& shape, DevicePtr<const float> cos_sin, DevicePtr<float> head) {
  const int num_pairs = shape.rotary_dim / 2;
  const int step = shape.interleaved != 0 ? 2 : 1;
  const int gap = shape.interleaved != 0 ? 1 : num_pairs;
  for (int i = threadIdx.x % kWarpSize; i < num_pairs; i += kWarpSize) {
    const float a = head[i * step];
    const float b = head[i * step + gap];
    const float cosine = cos_sin[i];
    const float sine = cos_sin[i + num_pairs];
    head[i * step] = a * cosine - b * sine;
    head[i * step + gap] = b * cosine + a * sine;
  }
  __syncwarp();
}

// Largest magnitude of the warp's vector; infinity or NaN when there is one, as their bits are above all others'.
__device__ float LargestMagnitude(int32_t head_dim, DevicePtr<const float> head) {
  unsigned largest = 0;
  for (int d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) {
    const unsigned bits = __float_as_uint(head[d]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, largest, lanes);
    largest = other > largest ? other : largest;
  }
  return __uint_as_float(largest);
}

template <typename T>
__device__ void StoreHead(int32_t head_dim, DevicePtr<const float> head, DevicePtr<T> y) {
  for (int d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) y[d] = FromFloat<T>(head[d]);
}

__device__ __forceinline__ int8_t ToScaled(float x, int8_t) {
  return static_cast<int8_t>(static_cast<int32_t>(rintf(x)));
}
__device__ __forceinline__ float8 ToScaled(float x, float8) { return RoundToFloat8(x); }

// A head whose elements reach up to `most`, and a scale, its largest magnitude / most. One with an infinity or a NaN
// gets the scale NaN, one too small for a scale becomes zero.
template <typename Stored>
__device__ void StoreScaled(int32_t head_dim, DevicePtr<const float> head, float most, DevicePtr<Stored> y,
                            DevicePtr<float> scale) {
  constexpr float kTiny = 1e-30f;
  constexpr unsigned kNan = 0x7fc00000u;
  const float largest = LargestMagnitude(head_dim, head);
  const bool is_finite = largest <= 3.402823466e38f;
  const bool is_zero = !is_finite || largest < kTiny;
  const float inverse = is_zero ? 0.0f : most / largest;
  for (int d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize)
    y[d] = is_zero ? Stored{} : ToScaled(head[d] * inverse, Stored{});
  if (threadIdx.x % kWarpSize != 0) return;
  scale[0] = !is_finite ? __uint_as_float(kNan) : (is_zero ? 0.0f : largest / most);
}

__device__ void StoreCached(int32_t head_dim, DevicePtr<const float> head, DevicePtr<int8_t> y, DevicePtr<float> s) {
  StoreScaled<int8_t>(head_dim, head, 127.0f, y, s);
}
__device__ void StoreCached(int32_t head_dim, DevicePtr<const float> head, DevicePtr<float8> y, DevicePtr<float> s) {
  StoreScaled<float8>(head_dim, head, kFloat8Max, y, s);
}
template <typename T>
__device__ void StoreCached(int32_t head_dim, DevicePtr<const float> head, DevicePtr<T> y, DevicePtr<float>) {
  StoreHead<T>(head_dim, head, y);
}

// Block (token, part): kWarps of a token's heads, those of q, then of k, then of v. K and V are elements of the cache.
// Where there are latent vectors, rows have heads of q alone, and the token's one key comes after them.
template <typename T, typename Cached>
__global__ __launch_bounds__(kThreads) void RopeStoreKvKernel(RopeShape shape, DevicePtr<const T> qkv,
                                                              DevicePtr<const T> latents, RopeArrays a,
                                                              DevicePtr<Cached> k, DevicePtr<Cached> v,
                                                              DevicePtr<T> q) {
  FDSD_SHARED(float, heads, kWarps* kMaxLatentDim);
  const int head_dim = shape.cache.head_dim;
  const int num_kv_heads = shape.cache.num_kv_heads;
  const bool has_latents = latents != nullptr;
  const int num_all = shape.num_heads + (has_latents ? 1 : 2 * num_kv_heads);
  const int warp = threadIdx.x / kWarpSize;
  const int h = static_cast<int>(blockIdx.y) * kWarps + warp;
  if (h >= num_all) return;
  const int64_t token = blockIdx.x;
  const bool is_query = h < shape.num_heads;
  const bool is_value = h >= shape.num_heads + num_kv_heads;
  const int64_t slot = a.slot_mapping[token];
  if (!is_query && slot < 0) return;
  const DevicePtr<float> head = heads + warp * kMaxLatentDim;
  const int64_t row = token * (has_latents ? shape.num_heads : num_all) + h;
  const DevicePtr<const T> x = has_latents && !is_query ? latents + token * head_dim : qkv + row * head_dim;
  for (int d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) head[d] = LoadFloat<T>(x, d);
  __syncwarp();
  if (!is_value) {
    const DevicePtr<const float> weight = is_query ? a.q_norm : a.k_norm;
    if (weight != nullptr) NormHead(head_dim, shape.norm_eps, weight, head);
    const int first = has_latents ? head_dim - shape.rotary_dim : 0;
    RotateHead(shape, a.cos_sin + static_cast<int64_t>(a.positions[token]) * shape.rotary_dim, head + first);
  }
  if (is_query) {
    if (a.q_scale != nullptr) {
      const float scale = a.q_scale[a.positions[token]];
      for (int d = threadIdx.x % kWarpSize; d < head_dim; d += kWarpSize) head[d] = head[d] * scale;
      __syncwarp();
    }
    StoreHead<T>(head_dim, head, q + (token * shape.num_heads + h) * head_dim);
    return;
  }
  const int kv_head = (h - shape.num_heads) % num_kv_heads;
  const int64_t index = shape.cache.Index(slot, kv_head);
  const DevicePtr<float> scales = is_value ? a.v_scale : a.k_scale;
  StoreCached(head_dim, head, (is_value ? v : k) + index * head_dim, scales == nullptr ? scales : scales + index);
}

template <typename T, typename Cached>
Error LaunchRope(const RopeStoreKvParams& p, const void* latents, Stream stream) {
  const RopeShape shape{ShapeOf(p.cache), p.num_heads, p.rotary_dim, p.interleaved, p.norm_eps};
  const RopeArrays arrays{DevicePtr<const int32_t>(p.positions), DevicePtr<const int64_t>(p.slot_mapping),
                          DevicePtr<const float>(p.cos_sin),     DevicePtr<const float>(p.q_scale),
                          DevicePtr<const float>(p.q_norm),      DevicePtr<const float>(p.k_norm),
                          DevicePtr<float>(p.cache.k_scale),     DevicePtr<float>(p.cache.v_scale)};
  const int64_t num_parts = DivideUp(p.num_heads + (latents == nullptr ? 2 * p.cache.num_kv_heads : 1), kWarps);
  const LaunchShape launch{dim3(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(num_parts)), dim3(kThreads)};
  return Launch<RopeStoreKvKernel<T, Cached>>(launch, stream, shape, DevicePtr<const T>(p.qkv),
                                              DevicePtr<const T>(latents), arrays, DevicePtr<Cached>(p.cache.k),
                                              DevicePtr<Cached>(p.cache.v), DevicePtr<T>(p.q));
}

template <typename T>
Error LaunchRopeOf(const RopeStoreKvParams& p, Stream stream) {
  switch (p.cache.kv_dtype) {
    case KvDType::kInt8:
      return LaunchRope<T, int8_t>(p, nullptr, stream);
    case KvDType::kFloat8:
      return LaunchRope<T, float8>(p, nullptr, stream);
    default:
      return LaunchRope<T, T>(p, nullptr, stream);
  }
}

Error CheckRope(const RopeStoreKvParams& p) {
  if (const Error error = CheckKvCache(p.cache); error != nullptr) return error;
  if (p.num_tokens < 0) return "num_tokens: expected no negative number";
  if (p.num_heads <= 0) return "num_heads: expected a positive number";
  if (p.rotary_dim <= 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.cache.head_dim)
    return "rotary_dim: expected an even number in 2..head_dim";
  return nullptr;
}

}  // namespace

Error RopeStoreKv(const RopeStoreKvParams& p, Stream stream) {
  if (const Error error = CheckRope(p); error != nullptr) return error;
  if (p.cache.v == nullptr) return "v: expected values besides the keys, got none";
  return WithElement(p.cache.dtype, [&](auto element) { return LaunchRopeOf<decltype(element)>(p, stream); });
}

Error RopeStoreLatent(const RopeStoreLatentParams& p, Stream stream) {
  const RopeStoreKvParams own = RopeOfHeads(p);
  if (const Error error = CheckRope(own); error != nullptr) return error;
  if (p.cache.v != nullptr) return "v: expected none, as keys are the values, got some";
  return WithElement(p.cache.dtype, [&](auto element) {
    using T = decltype(element);
    return LaunchRope<T, T>(own, p.latents, stream);
  });
}

}  // namespace fdsd::cuda
