// The tiles and stages that kernels choose for a device with given limits.
#include <algorithm>

#include "../../custom_ops/bindings/c_api.h"
#include "attention_partition.h"
#include "linear_kernels.h"

namespace {

using namespace fdsd::cuda;
using fdsd::bf16;

struct Plan {
  int32_t num_stages;    // 0 = the device has no room for such a kernel
  int32_t shared_bytes;  // of a block
  int32_t num_blocks;    // of a multiprocessor
};

Plan Made(const DeviceLimits& limits, const BlockNeeds& needs, int32_t num_stages, int32_t shared_bytes) {
  if (num_stages == 0) return {};
  return {num_stages, shared_bytes, BlocksOfSm(limits, needs, shared_bytes)};
}

template <typename Weights, int kRowTiles>
Plan OfFewRows(const DeviceLimits& limits, bool by_warpgroup) {
  using Few = FewRows<Weights, kRowTiles>;
  const int32_t num_stages = Few::NumStages(limits, by_warpgroup);
  const int32_t shared_bytes = Few::kStaticBytes + Few::DynamicBytes(num_stages, by_warpgroup);
  return Made(limits, {kThreads, Few::kMinBlocks}, num_stages, shared_bytes);
}

template <typename Weights, int kRowTiles>
Plan OfManyRows(const DeviceLimits& limits, int num_slices) {
  using Many = ManyRows<Weights, kRowTiles>;
  const int32_t num_stages = Many::NumStages(limits, num_slices);
  return Made(limits, {kThreads, 1}, num_stages, Many::DynamicBytes(num_stages, num_slices));
}

template <typename Weights>
Plan OfLinear(const DeviceLimits& limits, bool by_warpgroup, int32_t num_rows, int num_slices) {
  if (num_rows == 8) return OfFewRows<Weights, 1>(limits, by_warpgroup);
  if (num_rows == 32) return OfFewRows<Weights, 4>(limits, by_warpgroup);
  if constexpr (!Weights::kIsGrouped) {
    if (num_rows == 64) return OfFewRows<Weights, 8>(limits, by_warpgroup);
  }
  if (!Weights::kIsScaled && num_slices == 1) return OfManyRows<Weights, kWholeSumTiles>(limits, num_slices);
  return OfManyRows<Weights, kWholeSumTiles / 2>(limits, num_slices);
}

// Of integers with groups, the format being one from kFirst on.
template <int32_t kFirst = static_cast<int32_t>(fdsd::LinearFormat::kQ4Of0), typename Of>
Plan OfGrouped(fdsd::LinearFormat format, const Of& plan) {
  if constexpr (kFirst < fdsd::kNumLinearFormats) {
    if (static_cast<int32_t>(format) != kFirst) return OfGrouped<kFirst + 1>(format, plan);
    return plan.template operator()<GroupedWeights<kFirst>>();
  }
  return {};
}

template <typename Cached>
Plan OfAttention(const DeviceLimits& limits, int32_t head_dim) {
  AttentionShape shape{};
  shape.cache.head_dim = head_dim;
  shape.num_stages = NumStages<Cached>(limits, shape);
  const int32_t shared_bytes = SectionsOf<Cached>(shape).num_bytes + kArrivalBytes;
  return Made(limits, {kAttentionThreads, kAttentionBlocks}, shape.num_stages, shared_bytes);
}

}  // namespace

// Tiles of 8, 32, 64 or 128 rows; bfloat16 or a format of integers, of which those with groups have no 64 rows.
FDSD_EXPORT Plan linear_plan(DeviceLimits limits, int32_t by_warpgroup, int32_t format, int32_t num_rows,
                             int32_t num_slices) {
  const auto own = static_cast<fdsd::LinearFormat>(format);
  const auto plan = [&]<typename Weights> {
    return OfLinear<Weights>(limits, by_warpgroup != 0, num_rows, num_slices);
  };
  if (own == fdsd::LinearFormat::kBFloat16) return plan.operator()<Bf16Weights>();
  if (own == fdsd::LinearFormat::kWint8) return plan.operator()<Wint8Weights>();
  if (own == fdsd::LinearFormat::kWint4) return plan.operator()<Wint4Weights>();
  return OfGrouped(own, plan);
}

// Over a cache of elements of 1, 2 or 4 bytes.
FDSD_EXPORT Plan attention_plan(DeviceLimits limits, int32_t element_bytes, int32_t head_dim) {
  if (element_bytes == 1) return OfAttention<int8_t>(limits, head_dim);
  return element_bytes == 2 ? OfAttention<bf16>(limits, head_dim) : OfAttention<float>(limits, head_dim);
}
