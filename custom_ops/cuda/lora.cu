// Products of rows with the adapters in their slots. A block has some neighbouring rows, and reads a slot's matrices
// once for those of them that have its adapter.
#include "fdsd/lora.h"
#include "linear_layout.h"
#include "linear_stages.h"
#include "lora_check.h"
#include "ops.h"
#include "reduce.h"

namespace fdsd::cuda {
namespace {

constexpr int kRows = 8;
constexpr int kShrinkWarps = 8;
constexpr int kExpandThreads = 128;

// The adapters of a layer, and which rows have them.
struct AdapterMaps {
  int32_t num_rows;
  int32_t num_parts;
  int32_t max_rank;
  DevicePtr<const int32_t> slots;
  DevicePtr<const int32_t> ranks;
};

// The slots of a block's rows, -1 where a row has no adapter or is none.
struct BlockSlots {
  int64_t first;
  int32_t of[kRows];

  __device__ __forceinline__ explicit BlockSlots(const AdapterMaps& maps)
      : first(static_cast<int64_t>(blockIdx.x) * kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      of[i] = first + i < maps.num_rows ? static_cast<int32_t>(maps.slots[first + i]) : -1;
  }

  // Calls body(slot) once for every slot.
  template <typename Body>
  __device__ __forceinline__ void ForEach(const Body& body) const {
    int32_t slot = -1;
    while (true) {
      int32_t next = INT32_MAX;
#pragma unroll
      for (int i = 0; i < kRows; ++i) next = of[i] > slot && of[i] < next ? of[i] : next;
      if (next == INT32_MAX) return;
      slot = next;
      body(slot);
    }
  }
};

// Block (rows, columns): a warp has a column.
template <typename T>
__global__ __launch_bounds__(kShrinkWarps* kWarpSize) void LoraShrinkKernel(AdapterMaps maps, Slices slices,
                                                                            int32_t in_features, DevicePtr<const T> x,
                                                                            DevicePtr<const T> a, DevicePtr<float> u) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t column =
      static_cast<int32_t>(blockIdx.y) * kShrinkWarps + static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t width = maps.num_parts * maps.max_rank;
  if (column >= width) return;
  const int32_t part = column / maps.max_rank;
  const BlockSlots slots(maps);
  float sums[kRows] = {};
  slots.ForEach([&](int32_t slot) {
    if (column % maps.max_rank >= maps.ranks[int64_t{slot} * maps.num_parts + part]) return;
    const DevicePtr<const T> row = a + (int64_t{slot} * width + column) * in_features;
    SliceTree trees[kRows] = {};
#pragma unroll 1
    for (int s = 0; s < slices.count; ++s) {
      float of_slice[kRows] = {};
#pragma unroll 1
      for (int32_t k = slices.inputs[s] + lane; k < slices.inputs[s + 1]; k += kWarpSize) {
        const float value = LoadFloat<T>(row, k);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (slots.of[i] == slot)
            of_slice[i] = fmaf(LoadFloat<T>(x, (slots.first + i) * in_features + k), value, of_slice[i]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) trees[i].Add(s, WarpSum(of_slice[i]));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (slots.of[i] == slot) sums[i] = trees[i].Total(slices.count);
  });
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (slots.first + i < maps.num_rows) u[(slots.first + i) * width + column] = sums[i];
}

// Block (rows, columns): a thread has a column.
template <typename T>
__global__ __launch_bounds__(kExpandThreads) void LoraExpandKernel(AdapterMaps maps, int32_t out_features,
                                                                   DevicePtr<const float> u,
                                                                   DevicePtr<const float> scales,
                                                                   DevicePtr<const int32_t> part_ends,
                                                                   DevicePtr<const T> b, DevicePtr<T> y) {
  const int32_t column = static_cast<int32_t>(blockIdx.y) * kExpandThreads + static_cast<int32_t>(threadIdx.x);
  if (column >= out_features) return;
  int32_t part = 0;
  while (column >= part_ends[part]) ++part;
  const BlockSlots slots(maps);
  slots.ForEach([&](int32_t slot) {
    const int64_t of_part = int64_t{slot} * maps.num_parts + part;
    const int32_t rank = maps.ranks[of_part];
    if (rank == 0) return;
    float sums[kRows] = {};
#pragma unroll 1
    for (int32_t r = 0; r < rank; ++r) {
      const float value = LoadFloat<T>(b, (int64_t{slot} * maps.max_rank + r) * out_features + column);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (slots.of[i] == slot)
          sums[i] = fmaf(u[((slots.first + i) * maps.num_parts + part) * maps.max_rank + r], value, sums[i]);
    }
    const float scale = scales[of_part];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (slots.of[i] != slot) continue;
      const int64_t place = (slots.first + i) * out_features + column;
      y[place] = FromFloat<T>(fmaf(scale, sums[i], LoadFloat<T>(DevicePtr<const T>(y), place)));
    }
  });
}

LaunchShape ShapeOf(int32_t num_rows, int64_t num_columns, int columns, int threads) {
  const dim3 grid(static_cast<unsigned>(DivideUp(num_rows, kRows)),
                  static_cast<unsigned>(DivideUp(num_columns, columns)));
  return {grid, dim3(static_cast<unsigned>(threads))};
}

}  // namespace

Error LoraShrink(const LoraShrinkParams& p, Stream stream) {
  if (const Error error = CheckLoraShrink(p)) return error;
  const AdapterMaps maps{p.num_rows, p.num_parts, p.max_rank, DevicePtr<const int32_t>(p.slots),
                         DevicePtr<const int32_t>(p.ranks)};
  const Slices slices = SlicesOf(p.in_features, LinearFormat::kFloat32, p.slices);
  const LaunchShape shape =
      ShapeOf(p.num_rows, int64_t{p.num_parts} * p.max_rank, kShrinkWarps, kShrinkWarps * kWarpSize);
  return WithElement(p.dtype, [&]<typename T>(T) {
    return Launch<LoraShrinkKernel<T>>(shape, stream, maps, slices, p.in_features, DevicePtr<const T>(p.x),
                                       DevicePtr<const T>(p.a), DevicePtr<float>(p.u));
  });
}

Error LoraExpand(const LoraExpandParams& p, Stream stream) {
  if (const Error error = CheckLoraExpand(p)) return error;
  const AdapterMaps maps{p.num_rows, p.num_parts, p.max_rank, DevicePtr<const int32_t>(p.slots),
                         DevicePtr<const int32_t>(p.ranks)};
  const LaunchShape shape = ShapeOf(p.num_rows, p.out_features, kExpandThreads, kExpandThreads);
  return WithElement(p.dtype, [&]<typename T>(T) {
    return Launch<LoraExpandKernel<T>>(shape, stream, maps, p.out_features, DevicePtr<const float>(p.u),
                                       DevicePtr<const float>(p.scales), DevicePtr<const int32_t>(p.part_ends),
                                       DevicePtr<const T>(p.b), DevicePtr<T>(p.y));
  });
}

}  // namespace fdsd::cuda
