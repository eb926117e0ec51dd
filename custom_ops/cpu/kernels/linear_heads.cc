// Products of each head of a row with a matrix of the head's own.
#include "linear_panel.h"
#include "scratch.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr SliceRule kWhole = {1, 1};
// Rows of a head that a thread packs and multiplies at a time.
constexpr int32_t kTaskRows = 96;

Error CheckHeads(const HeadLinearParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.num_heads <= 0) return "num_heads: expected a positive number, got 0 or less";
  if (p.num_rest < 0) return "num_rest: expected 0 or more, got a negative number";
  if (const Error error = CheckProcessorFormat(p.format)) return error;
  return CheckLinear(p.in_features, p.out_features, p.format, kWhole, p.packed);
}

}  // namespace

Error HeadLinear(const HeadLinearParams& p) {
  if (const Error error = CheckHeads(p)) return error;
  const Slices slices = SlicesOf(p.in_features, p.format, kWhole);
  const RowKernels& kernels = RowKernelsOf(p.format, p.num_tokens);
  const Blocking blocking = BlockingOf(kernels, p.format);
  const int64_t panel_bytes = PanelBytes(slices, p.format);
  const int64_t matrix_bytes = PackedLinearBytes(p.in_features, p.out_features, p.format, kWhole);
  const int64_t element = ElementBytes(p.dtype);
  const int64_t x_head = p.in_features + p.num_rest;
  const int64_t num_passing = p.passes != 0 ? p.num_rest : 0;
  const int64_t y_head = p.out_features + num_passing;
  const int64_t num_chunks = DivideUp(p.num_tokens, kTaskRows);
  ParallelFor(p.num_heads * num_chunks, [&](int64_t task) {
    const int64_t head = task / num_chunks;
    const int64_t first = task % num_chunks * kTaskRows;
    const auto count = static_cast<int32_t>(std::min<int64_t>(kTaskRows, p.num_tokens - first));
    const char* const x = static_cast<const char*>(p.x) + (first * p.num_heads + head) * x_head * element;
    char* const y = static_cast<char*>(p.y) + (first * p.num_heads + head) * y_head * element;
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(y + (r * p.num_heads * y_head + p.out_features) * element,
                  x + (r * p.num_heads * x_head + p.in_features) * element, static_cast<size_t>(num_passing * element));
    }
    auto* const memory = ScratchArray<uint8_t>(Scratch::kInner, PackedRows::Bytes(kernels, slices, p.format, count));
    const PackedRows rows(kernels, blocking, slices, p.format, count, memory);
    for (int64_t tile = 0; tile < rows.num_tiles; ++tile) {
      const int64_t from = rows.Begin(tile) * p.num_heads * x_head * element;
      kernels.pack_tile({p.format, p.dtype, p.in_features, p.num_heads * x_head, x + from, nullptr}, slices,
                        rows.Size(tile), 0, slices.num_units(), rows.Tile(tile));
    }
    const LinearOutput out{p.dtype, p.out_features, nullptr, y, p.num_heads * y_head};
    const uint8_t* const panels = static_cast<const uint8_t*>(p.packed) + head * matrix_bytes;
    for (int64_t panel = 0; panel < DivideUp(p.out_features, kPanelColumns); ++panel) {
      kernels.multiply_panel(rows, 0, rows.num_tiles, panels + panel * panel_bytes, panel, out);
    }
    kernels.leave();
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
