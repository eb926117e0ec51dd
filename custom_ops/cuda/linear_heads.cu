// Products of each head of a row with a matrix of the head's own: the heads' rows are put together, multiplied as those
// of experts are, and go to their places.
#include <limits>

#include "fdsd/linear.h"
#include "linear_layout.h"
#include "numbers.h"
#include "ops.h"
#include "row_copy.h"
#include "row_groups.h"

namespace fdsd::cuda {
namespace {

constexpr SliceRule kWhole = {1, 1};

// Of a head of x and of y, in units.
struct HeadUnits {
  int64_t num_tokens;
  int64_t in;
  int64_t out;
  int64_t rest;
  int64_t passing;  // 0 or `rest`
};

// Block (token, head).
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void TakeHeadsKernel(HeadUnits units, DevicePtr<const Unit> x,
                                                                DevicePtr<Unit> rows, DevicePtr<Unit> y) {
  const int64_t index = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  const DevicePtr<const Unit> from = x + index * (units.in + units.rest);
  CopyRow(from + units.in, y + (index * (units.out + units.passing) + units.out), units.passing);
  CopyRow(from, rows + (int64_t{blockIdx.y} * units.num_tokens + blockIdx.x) * units.in, units.in);
}

// Block (token, head).
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void PutHeadsKernel(HeadUnits units, DevicePtr<const Unit> products,
                                                               DevicePtr<Unit> y) {
  const int64_t index = int64_t{blockIdx.x} * gridDim.y + blockIdx.y;
  CopyRow(products + (int64_t{blockIdx.y} * units.num_tokens + blockIdx.x) * units.out,
          y + index * (units.out + units.passing), units.out);
}

// Where the rows and the tiles of each head begin.
__global__ __launch_bounds__(kCopyThreads) void NumberHeadsKernel(int32_t num_heads, int32_t num_tokens,
                                                                  int32_t tiles_per_head, DevicePtr<int32_t> first,
                                                                  DevicePtr<int32_t> first_tile) {
  for (int32_t h = threadIdx.x; h <= num_heads; h += kCopyThreads) {
    first[h] = h * num_tokens;
    first_tile[h] = h * tiles_per_head;
  }
}

struct HeadCall {
  const HeadLinearParams& p;
  int64_t num_bytes = 0;
  void* rows;      // [Hq, T, K]
  void* products;  // [Hq, T, N]
  void* first;     // [Hq + 1]
  void* first_tile;
  void* linear;

  // workspace nullptr: only to ask how large it is.
  HeadCall(const HeadLinearParams& params, void* workspace) : p(params) {
    const auto take = [&](int64_t bytes) -> void* {
      constexpr int64_t kAlignment = 128;
      char* const part = workspace == nullptr ? nullptr : static_cast<char*>(workspace) + num_bytes;
      num_bytes += DivideUp(bytes, kAlignment) * kAlignment;
      return part;
    };
    rows = take(NumRows() * p.in_features * ElementBytes(p.dtype));
    products = take(NumRows() * p.out_features * ElementBytes(p.dtype));
    first = take((p.num_heads + 1) * int64_t{sizeof(int32_t)});
    first_tile = take((p.num_heads + 1) * int64_t{sizeof(int32_t)});
    linear = take(LinearWorkspaceBytes(Product()));
  }

  int64_t NumRows() const { return int64_t{p.num_heads} * p.num_tokens; }
  LinearParams Product() const {
    return {static_cast<int32_t>(NumRows()),
            p.in_features,
            p.out_features,
            p.format,
            kWhole,
            p.dtype,
            p.dtype,
            rows,
            p.packed,
            nullptr,
            products};
  }

  Error Run(Stream stream) const {
    const int32_t tile_rows = TileRowsOf(p.format, p.num_tokens);
    const auto tiles_per_head = static_cast<int32_t>(DivideUp(p.num_tokens, tile_rows));
    const LaunchShape one{dim3(1), dim3(kCopyThreads)};
    if (Error error = Launch<NumberHeadsKernel>(one, stream, p.num_heads, p.num_tokens, tiles_per_head,
                                                DevicePtr<int32_t>(first), DevicePtr<int32_t>(first_tile)))
      return error;
    const int64_t element = ElementBytes(p.dtype);
    const void* const arrays[] = {p.x, p.y, rows, products};
    const LaunchShape heads{dim3(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_heads)),
                            dim3(kCopyThreads)};
    // A power of two divides all widths if it divides the bits that any has.
    return WithCopyUnit((p.num_rest | p.in_features | p.out_features) * element, arrays, [&]<typename Unit>(Unit) {
      const int64_t size = static_cast<int64_t>(sizeof(Unit));
      const int64_t rest = p.num_rest * element / size;
      const HeadUnits units{p.num_tokens, p.in_features * element / size, p.out_features * element / size, rest,
                            p.passes != 0 ? rest : 0};
      if (Error error = Launch<TakeHeadsKernel<Unit>>(heads, stream, units, DevicePtr<const Unit>(p.x),
                                                      DevicePtr<Unit>(rows), DevicePtr<Unit>(p.y)))
        return error;
      const RowGroups groups{p.num_heads,
                             static_cast<int32_t>(NumRows()),
                             tile_rows,
                             DevicePtr<const int32_t>(first),
                             DevicePtr<const int32_t>(first_tile),
                             nullptr};
      if (Error error = MultiplyGroups(Product(), groups, linear, stream)) return error;
      return Launch<PutHeadsKernel<Unit>>(heads, stream, units, DevicePtr<const Unit>(products), DevicePtr<Unit>(p.y));
    });
  }
};

Error CheckHeads(const HeadLinearParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.num_heads <= 0 || p.num_heads > 65535) return "num_heads: expected 1..65535, got another number";
  if (p.num_rest < 0) return "num_rest: expected 0 or more, got a negative number";
  if (int64_t{p.num_heads} * p.num_tokens > std::numeric_limits<int32_t>::max())
    return "num_tokens: expected at most 2^31 - 1 heads of tokens, got more";
  return CheckLinear(p.in_features, p.out_features, p.format, kWhole, p.packed);
}

}  // namespace

int64_t HeadLinearWorkspaceBytes(const HeadLinearParams& p) {
  return CheckHeads(p) == nullptr ? HeadCall(p, nullptr).num_bytes : 0;
}

Error HeadLinear(const HeadLinearParams& p, void* workspace, Stream stream) {
  if (const Error error = CheckHeads(p)) return error;
  return HeadCall(p, workspace).Run(stream);
}

}  // namespace fdsd::cuda
