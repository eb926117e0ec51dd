// Products of few or many rows with packed weights, which are packed as for the CPU (linear_layout.h): what a lane
// reads of a panel is what it multiplies. How many rows a block has changes no row's bits (linear_stages.h).
#include "fdsd/linear.h"
#include "linear_kernels.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

// Block (panel, tile): 32 columns of 8 rows of a group, a thread per element. Needs no speed: no GPU serves float32.
template <typename X>
__global__ __launch_bounds__(kFloatTileRows* kPanelColumns) void LinearFloatKernel(LinearShape shape, RowGroups groups,
                                                                                   DevicePtr<const X> x,
                                                                                   DevicePtr<const float> packed,
                                                                                   LinearOutput output) {
  const int32_t in_features = shape.slices.inputs[shape.slices.count];
  const int lane = threadIdx.x % kWarpSize;
  const RowGroups::Tile rows = groups.TileOf(static_cast<int32_t>(blockIdx.y), kFloatTileRows);
  const int64_t row = rows.begin + threadIdx.x / kWarpSize;
  const int32_t column = static_cast<int32_t>(blockIdx.x) * kPanelColumns + lane;
  if (row >= rows.end || column >= shape.out_features) return;
  const int64_t panel_index = static_cast<int64_t>(rows.group) * gridDim.x + blockIdx.x;
  const DevicePtr<const float> panel = packed + panel_index * in_features * kPanelColumns;
  const int64_t source = groups.SourceOf(row);
  SliceTree total{};
#pragma unroll
  for (int s = 0; s < kMaxSlices; ++s) {
    if (s >= shape.slices.count) break;
    float sum = 0.0f;
    for (int32_t k = shape.slices.inputs[s]; k < shape.slices.inputs[s + 1]; ++k)
      sum = fmaf(LoadFloat<X>(x, source * in_features + k), panel[static_cast<int64_t>(k) * kPanelColumns + lane], sum);
    total.Add(s, sum);
  }
  output.Store(shape, row, column, total.Total(shape.slices.count));
}

// Chips take 8-bit floats apart into registers, and scale what groups make: too few are left for 64 rows.
template <typename Weights>
constexpr bool kHasTilesOf64 = Weights::kFormat != LinearFormat::kFp8 && !Weights::kIsGrouped;

struct LinearCall {
  const LinearParams& p;
  RowGroups groups;
  LinearShape shape;
  LinearInput input;
  LinearOutput output;
  Stream stream;

  unsigned num_panels() const { return static_cast<unsigned>(DivideUp(p.out_features, kPanelColumns)); }

  // A group's last tile may have few rows.
  unsigned num_tiles() const {
    return static_cast<unsigned>(DivideUp(groups.max_rows, groups.tile_rows) + groups.count - 1);
  }

  template <typename Weights, int kRowTiles>
  Error MultiplyFewRows() const {
    using Few = FewRows<Weights, kRowTiles>;
    const bool by_warpgroup = DeviceHasWarpgroupProducts();
    const int32_t num_stages = Few::NumStages(LimitsOfDevice(), by_warpgroup);
    const LaunchShape launch{dim3(num_panels(), num_tiles()), dim3(kThreads),
                             Few::DynamicBytes(num_stages, by_warpgroup)};
    return Multiply<FewRowsKernel<Weights, kRowTiles>>(launch, num_stages);
  }

  template <typename Weights, int kRowTiles>
  Error MultiplyManyRows() const {
    using Many = ManyRows<Weights, kRowTiles>;
    const auto num_columns = static_cast<unsigned>(DivideUp(num_panels(), Many::kPanels));
    const int32_t num_stages = Many::NumStages(LimitsOfDevice(), shape.slices.count);
    const LaunchShape launch{dim3(num_columns, num_tiles()), dim3(kThreads),
                             Many::DynamicBytes(num_stages, shape.slices.count)};
    return Multiply<ManyRowsKernel<Weights, kRowTiles>>(launch, num_stages);
  }

  template <auto kernel>
  Error Multiply(const LaunchShape& launch, int32_t num_stages) const {
    if (num_stages == 0) return kNoSharedMemory;
    LinearShape own = shape;
    own.num_stages = num_stages;
    return Launch<kernel>(launch, stream, own, groups, input, DevicePtr<const uint8_t>(p.packed), output);
  }

  // More rows at a time read the weights less often, and change no row's bits.
  template <typename Weights>
  Error MultiplyRows() const {
    switch (groups.tile_rows) {
      case 8:
        return MultiplyFewRows<Weights, 1>();
      case 32:
        return MultiplyFewRows<Weights, 4>();
      default:
        break;
    }
    if constexpr (kHasTilesOf64<Weights>) {
      if (groups.tile_rows == 64) return MultiplyFewRows<Weights, 8>();
    }
    // Registers have room for more rows where no products of integers and no slices are kept.
    if constexpr (!Weights::kIsScaled) {
      if (shape.slices.count == 1) return MultiplyManyRows<Weights, kWholeSumTiles>();
    }
    return MultiplyManyRows<Weights, kWholeSumTiles / 2>();
  }

  // By the kernels of the format, which is one from kFirst on.
  template <int32_t kFirst = static_cast<int32_t>(LinearFormat::kQ4Of0)>
  Error MultiplyGrouped() const {
    if constexpr (kFirst < kNumLinearFormats) {
      if (static_cast<int32_t>(p.format) != kFirst) return MultiplyGrouped<kFirst + 1>();
      return MultiplyRows<GroupedWeights<kFirst>>();
    } else {
      return "format: expected one of a kernel, got another";
    }
  }

  template <typename X>
  Error MultiplyFloats() const {
    return Launch<LinearFloatKernel<X>>(
        LaunchShape{dim3(num_panels(), num_tiles()), dim3(kFloatTileRows * kPanelColumns)}, stream, shape, groups,
        DevicePtr<const X>(p.x), DevicePtr<const float>(p.packed), output);
  }

  template <typename X>
  Error PrepareInput() const {
    const int32_t num_words = shape.slices.num_stages() * kStageWords;
    // A thread has a word of either kind.
    const auto num_parts = static_cast<unsigned>(DivideUp(num_words, kInputThreads));
    const LaunchShape launch{dim3(static_cast<unsigned>(p.num_rows), num_parts), dim3(kInputThreads)};
    const auto run = [&]<auto kernel> {
      return Launch<kernel>(launch, stream, p.in_features, shape.slices, groups, DevicePtr<const X>(p.x), input);
    };
    switch (p.format) {
      case LinearFormat::kBFloat16:
        return run.template operator()<PairInputsKernel<X, bf16, false>>();
      case LinearFormat::kE4m3:
        return run.template operator()<PairInputsKernel<X, bf16, true>>();
      case LinearFormat::kFloat16:
        return run.template operator()<PairInputsKernel<X, half16, false>>();
      case LinearFormat::kFp8:
        return run.template operator()<QuantizeInputsKernel<X, true>>();
      default:
        return run.template operator()<QuantizeInputsKernel<X, false>>();
    }
  }

  template <typename X>
  Error Run() const {
    if (p.format == LinearFormat::kFloat32) return MultiplyFloats<X>();
    if (const Error error = PrepareInput<X>(); error != nullptr) return error;
    if (IsGrouped(p.format)) return MultiplyGrouped();
    switch (p.format) {
      case LinearFormat::kBFloat16:
        return MultiplyRows<Bf16Weights>();
      case LinearFormat::kFloat16:
        return MultiplyRows<Half16Weights>();
      case LinearFormat::kFp8:
        return MultiplyRows<Fp8Weights>();
      case LinearFormat::kE4m3:
        return MultiplyRows<E4m3Weights>();
      case LinearFormat::kWint8:
        return MultiplyRows<Wint8Weights>();
      default:
        return MultiplyRows<Wint4Weights>();
    }
  }
};

// Whether the device has shared memory for tiles of 64 rows.
bool HasTilesOf64(LinearFormat format) {
  const DeviceLimits limits = LimitsOfDevice();
  const bool by_warpgroup = DeviceHasWarpgroupProducts();
  switch (format) {
    case LinearFormat::kBFloat16:
    case LinearFormat::kFloat16:
      return FewRows<Bf16Weights, 8>::NumStages(limits, by_warpgroup) > 0;
    case LinearFormat::kE4m3:
      return FewRows<E4m3Weights, 8>::NumStages(limits, by_warpgroup) > 0;
    case LinearFormat::kWint8:
      return FewRows<Wint8Weights, 8>::NumStages(limits, by_warpgroup) > 0;
    case LinearFormat::kWint4:
      return FewRows<Wint4Weights, 8>::NumStages(limits, by_warpgroup) > 0;
    default:
      return false;
  }
}

// Where the input's parts lie in the workspace: the words come first.
struct LinearWorkspace {
  int64_t scales;
  int64_t num_bytes;
};

LinearWorkspace WorkspaceOf(const LinearParams& p) {
  if (p.format == LinearFormat::kFloat32) return LinearWorkspace{0, 0};
  constexpr int64_t kAlignment = 128;
  const SliceBorders slices = BordersOf(SlicesOf(p.in_features, p.format, p.slices), p.format);
  const int64_t num_groups = IsQuantized(p.format) && p.format != LinearFormat::kE4m3 ? slices.units[slices.count] : 0;
  const int64_t word_bytes =
      DivideUp(p.num_rows * int64_t{slices.num_stages()} * kStageRowBytes, kAlignment) * kAlignment;
  return LinearWorkspace{word_bytes, word_bytes + p.num_rows * num_groups * int64_t{sizeof(GroupScale)}};
}

}  // namespace

int32_t TileRowsOf(LinearFormat format, int64_t rows_per_group) {
  if (format == LinearFormat::kFloat32) return kFloatTileRows;
  if (rows_per_group <= 8) return 8;
  if (rows_per_group <= 32) return 32;
  if (rows_per_group > 64) return kManyRows;
  return HasTilesOf64(format) ? 64 : 32;
}

int64_t LinearWorkspaceBytes(const LinearParams& p) { return WorkspaceOf(p).num_bytes; }

Error MultiplyGroups(const LinearParams& p, const RowGroups& groups, void* workspace, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (const Error error = CheckLinear(p.in_features, p.out_features, p.format, p.slices, p.packed)) return error;
  const LinearWorkspace parts = WorkspaceOf(p);
  char* const bytes = static_cast<char*>(workspace);
  const LinearInput input{p.num_rows, DevicePtr<uint32_t>(bytes), DevicePtr<GroupScale>(bytes + parts.scales)};
  const LinearShape shape{p.out_features, BordersOf(SlicesOf(p.in_features, p.format, p.slices), p.format), p.y_dtype,
                          0};
  const LinearOutput output{DevicePtr<const float>(p.bias), DevicePtr<uint8_t>(p.y)};
  const LinearCall call{p, groups, shape, input, output, stream};
  return WithElement(p.x_dtype, [&](auto element) { return call.Run<decltype(element)>(); });
}

Error Linear(const LinearParams& p, void* workspace, Stream stream) {
  const RowGroups rows{1, p.num_rows, TileRowsOf(p.format, p.num_rows), nullptr, nullptr, nullptr};
  return MultiplyGroups(p, rows, workspace, stream);
}

}  // namespace fdsd::cuda
