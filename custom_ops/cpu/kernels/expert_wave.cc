// Experts over their rows. Each runs on all of its rows at once, so its weights are read once.
#include "expert_wave.h"

#include "fdsd/activation.h"
#include "parallel_ranges.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

Error Swiglu(const SwigluParams& p);
void ClampedSwiglu(const SwigluParams& p, float limit);

namespace {

// Within an expert no sum is cut.
constexpr SliceRule kWhole = {1, 1};

}  // namespace

Error CheckExperts(const ExpertShape& shape) {
  if (shape.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (shape.intermediate_size <= 0) return "intermediate_size: expected a positive number, got 0 or less";
  if (!(shape.gate_limit >= 0)) return "gate_limit: expected 0 (none) or a positive number, got another";
  for (const LinearFormat format : {shape.gate_up_format, shape.down_format}) {
    if (const Error error = CheckProcessorFormat(format)) return error;
    if (const Error error = CheckLinear(shape.hidden_size, shape.intermediate_size, format, kWhole, nullptr))
      return error;
  }
  return nullptr;
}

ExpertMatrices::ExpertMatrices(LinearFormat format, int32_t in_features, int32_t out_features, int64_t rows_per_expert)
    : format(format),
      in_features(in_features),
      out_features(out_features),
      slices(SlicesOf(in_features, format, kWhole)),
      kernels(RowKernelsOf(format, rows_per_expert)),
      blocking(BlockingOf(kernels, format)) {}

ExpertBuffers::ExpertBuffers(const RunExpertsParams& p, int64_t most_pairs, int64_t num_pairs, Arena* arena)
    : gate_up_matrices(p.shape.gate_up_format, p.shape.hidden_size, 2 * p.shape.intermediate_size, p.rows_per_expert),
      down_matrices(p.shape.down_format, p.shape.intermediate_size, p.shape.hidden_size, p.rows_per_expert) {
  const int64_t rows = std::max<int64_t>(std::min<int64_t>(num_pairs, kWavePairs), most_pairs);
  experts = arena->Take<int32_t>(p.num_experts);
  gate_up_matrices.first_tile = arena->Take<int32_t>(p.num_experts + 1);
  down_matrices.first_tile = arena->Take<int32_t>(p.num_experts + 1);
  const auto bytes = [&](const ExpertMatrices& m) { return PackedRows::Bytes(m.kernels, m.slices, m.format, rows); };
  packed = arena->Take<uint8_t>(std::max(bytes(gate_up_matrices), bytes(down_matrices)));
  gate_up = arena->Take<char>(rows * p.shape.intermediate_size * 2 * ElementBytes(p.shape.dtype));
  activated = arena->Take<char>(rows * p.shape.intermediate_size * ElementBytes(p.shape.dtype));
  y = arena->Take<float>(rows * p.shape.hidden_size);
}

ExpertWave::ExpertWave(const RunExpertsParams& p, const ExpertBuffers& b, int32_t* expert)
    : p_(p), b_(b), first_pair_(p.first_pair[*expert]) {
  for (const ExpertMatrices* m : {&b.gate_up_matrices, &b.down_matrices}) m->first_tile[0] = 0;
  for (; *expert < p.num_experts; ++*expert) {
    const int32_t end = p.first_pair[*expert + 1];
    const int32_t num_pairs = end - p.first_pair[*expert];
    if (num_pairs == 0) continue;
    if (num_experts_ > 0 && end - first_pair_ > kWavePairs) break;
    b.experts[num_experts_] = *expert;
    for (const ExpertMatrices* m : {&b.gate_up_matrices, &b.down_matrices}) {
      m->first_tile[num_experts_ + 1] = m->first_tile[num_experts_] + m->blocking.NumTiles(num_pairs);
    }
    ++num_experts_;
  }
  end_pair_ = p.first_pair[*expert];
}

void ExpertWave::Run() const {
  const ExpertShape& shape = p_.shape;
  ForEachTile(b_.gate_up_matrices, [&](int64_t e, int64_t tile) { PackX(e, tile); });
  Multiply(b_.gate_up_matrices, [&](int64_t e) {
    const ExpertWeights& weights = p_.experts[b_.experts[e]];
    const int64_t size = int64_t{2} * shape.intermediate_size;
    char* const y = b_.gate_up + FirstRow(e) * size * ElementBytes(shape.dtype);
    return Product{weights.gate_up, {shape.dtype, 2 * shape.intermediate_size, weights.gate_up_bias, y}};
  });
  ForEachTile(b_.down_matrices, [&](int64_t e, int64_t tile) { Activate(e, tile); });
  Multiply(b_.down_matrices, [&](int64_t e) {
    const ExpertWeights& weights = p_.experts[b_.experts[e]];
    LinearOutput out{DType::kFloat32, shape.hidden_size, weights.down_bias, b_.y + FirstRow(e) * shape.hidden_size};
    if (IsInPlace(e)) {
      out.y = p_.y + p_.y_rows[p_.first_pair[b_.experts[e]]] * p_.y_stride;
      out.y_stride = p_.y_stride;
    }
    return Product{weights.down, out};
  });
  if (p_.y_rows != nullptr) PlaceRows();
}

// Whether the places of an expert's rows follow one another.
bool ExpertWave::IsInPlace(int64_t e) const {
  const int32_t* first = p_.first_pair + b_.experts[e];
  return p_.y_rows != nullptr && p_.y_rows[first[1] - 1] - p_.y_rows[first[0]] == first[1] - first[0] - 1;
}

// Copy rows to their places.
void ExpertWave::PlaceRows() const {
  const int64_t size = p_.shape.hidden_size;
  for (int64_t e = 0; e < num_experts_; ++e) {
    if (IsInPlace(e)) continue;
    const int32_t* first = p_.first_pair + b_.experts[e];
    const float* from = b_.y + FirstRow(e) * size;
    ParallelForRows(first[1] - first[0], 8 * size, [&](int64_t row) {
      float* to = p_.y + p_.y_rows[first[0] + row] * p_.y_stride;
      std::memcpy(to, from + row * size, sizeof(float) * static_cast<size_t>(size));
    });
  }
}

// First row of the e-th expert of the wave.
int64_t ExpertWave::FirstRow(int64_t e) const { return p_.first_pair[b_.experts[e]] - first_pair_; }

PackedRows ExpertWave::Rows(const ExpertMatrices& m, int64_t e) const {
  const int32_t* first = p_.first_pair + b_.experts[e];
  const int64_t offset = FirstRow(e) * m.kernels.row_bytes(m.slices, m.format);
  return {m.kernels, m.blocking, m.slices, m.format, first[1] - first[0], b_.packed + offset};
}

// body(e, tile) for the tiles of all experts, on all threads.
template <typename Body>
void ExpertWave::ForEachTile(const ExpertMatrices& m, Body&& body) const {
  ParallelFor(m.first_tile[num_experts_], [&](int64_t task) {
    int64_t e = 0;
    while (m.first_tile[e + 1] <= task) ++e;
    body(e, task - m.first_tile[e]);
  });
}

void ExpertWave::PackX(int64_t e, int64_t tile) const {
  const PackedRows rows = Rows(b_.gate_up_matrices, e);
  const int32_t* indices = p_.x_rows + first_pair_ + FirstRow(e) + rows.Begin(tile);
  const XRows x{rows.format, p_.shape.dtype, p_.shape.hidden_size, p_.x_stride, p_.x, indices};
  rows.kernels->pack_tile(x, rows.slices, rows.Size(tile), 0, rows.slices.num_units(), rows.Tile(tile));
}

// What gate_up left is rounded to the dtype of x, and so is swiglu's result, as in a dense layer.
void ExpertWave::Activate(int64_t e, int64_t tile) const {
  const int32_t inner = p_.shape.intermediate_size;
  const DType dtype = p_.shape.dtype;
  const PackedRows rows = Rows(b_.down_matrices, e);
  const int64_t row = FirstRow(e) + rows.Begin(tile);
  const char* gate_up = b_.gate_up + row * 2 * inner * ElementBytes(dtype);
  char* activated = b_.activated + row * inner * ElementBytes(dtype);
  const SwigluParams swiglu{rows.Size(tile), inner, dtype, gate_up, activated};
  if (p_.shape.gate_limit > 0) {
    ClampedSwiglu(swiglu, p_.shape.gate_limit);
  } else {
    FDSD_ISA::Swiglu(swiglu);  // cannot fail: CheckExperts has seen the sizes
  }
  rows.kernels->pack_tile({rows.format, dtype, inner, inner, activated, nullptr}, rows.slices, rows.Size(tile), 0,
                          rows.slices.num_units(), rows.Tile(tile));
}

// One pass over the panels of all experts: a thread reads a stretch of them from end to end.
template <typename ProductOf>
void ExpertWave::Multiply(const ExpertMatrices& matrices, ProductOf&& product_of) const {
  const int64_t num_panels = DivideUp(matrices.out_features, kPanelColumns);
  const int64_t panel_bytes = PanelBytes(matrices.slices, matrices.format);
  const auto multiply = [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t e = unit / num_panels;
      const int64_t panel = unit % num_panels;
      const PackedRows rows = Rows(matrices, e);
      const Product product = product_of(e);
      const uint8_t* const packed = static_cast<const uint8_t*>(product.weights) + panel * panel_bytes;
      matrices.kernels.multiply_panel(rows, 0, rows.num_tiles, packed, panel, product.out);
    }
    matrices.kernels.leave();
  };
  ParallelRanges(num_experts_ * num_panels, DivideUp(kMinPieceBytes, panel_bytes), multiply, panel_bytes);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
