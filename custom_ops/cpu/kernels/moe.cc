// Mixture of experts: route every token, then run the used experts side by side. Each runs on all of its tokens at
// once, so its weights are read once. A token's sum grows in the order of expert ids, slice by slice, whatever other
// tokens the call has.
#include "fdsd/moe.h"

#include "fdsd/activation.h"
#include "linear_panel.h"
#include "moe_check.h"
#include "moe_router.h"
#include "parallel_ranges.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

Error Swiglu(const SwigluParams& p);
void ClampedSwiglu(const SwigluParams& p, float limit);

namespace {

// Pairs that go through the experts together, unless one expert alone has more: all threads have work in every pass,
// and what the passes leave for each other stays in the caches.
constexpr int32_t kWavePairs = 512;

// Within an expert no sum is cut.
constexpr SliceRule kWhole = {1, 1};
Slices WholeSum(int32_t in_features, LinearFormat format) { return SlicesOf(in_features, format, kWhole); }

int64_t NumRows(const MoeFfnParams& p) { return int64_t{p.num_tokens} * p.router.top_k / std::max(p.num_experts, 1); }

// One of the two matrices of every expert, and how its rows of x are packed.
struct ExpertMatrices {
  LinearFormat format;
  int32_t in_features;
  int32_t out_features;
  const float* bias;      // [L, out_features], may be nullptr
  const uint8_t* packed;  // [L] matrices, one after another
  int64_t num_rows;       // of an expert, on average
  Slices slices = WholeSum(in_features, format);
  const RowKernels& kernels = RowKernelsOf(format, num_rows);
  Blocking blocking = BlockingOf(kernels, format);
  int32_t* first_tile = nullptr;  // [L + 1] of a wave's experts

  const uint8_t* Panel(int64_t expert, int64_t panel) const {
    return packed + expert * PackedLinearBytes(in_features, out_features, format, kWhole) +
           panel * PanelBytes(slices, format);
  }
};

struct Buffers {
  ExpertMatrices gate_up_matrices;
  ExpertMatrices down_matrices;
  MoePairs pairs;
  float* sums;  // [slices, T, H]
  // One wave's: used experts in order of their ids, and the pairs of each as rows.
  int32_t* experts;  // [L]
  uint8_t* packed;   // [W] rows of x, then of the activations
  char* gate_up;     // [W, 2 * I]
  char* activated;   // [W, I]
  float* y;          // [W, H]
  char* router;

  Buffers(const MoeFfnParams& p, Arena* arena)
      : gate_up_matrices{p.experts.gate_up_format,
                         p.hidden_size,
                         2 * p.intermediate_size,
                         p.experts.gate_up_bias,
                         static_cast<const uint8_t*>(p.experts.gate_up),
                         NumRows(p)},
        down_matrices{p.experts.down_format,
                      p.intermediate_size,
                      p.hidden_size,
                      p.experts.down_bias,
                      static_cast<const uint8_t*>(p.experts.down),
                      NumRows(p)},
        pairs(p, arena) {
    const int64_t tokens = p.num_tokens;
    // An expert has at most one pair per token.
    const int64_t rows = std::max<int64_t>(std::min<int64_t>(tokens * p.router.top_k, kWavePairs), tokens);
    sums = arena->Take<float>(p.num_slices * tokens * p.hidden_size);
    experts = arena->Take<int32_t>(p.num_local_experts);
    gate_up_matrices.first_tile = arena->Take<int32_t>(p.num_local_experts + 1);
    down_matrices.first_tile = arena->Take<int32_t>(p.num_local_experts + 1);
    const auto bytes = [&](const ExpertMatrices& m) { return PackedRows::Bytes(m.kernels, m.slices, m.format, rows); };
    packed = arena->Take<uint8_t>(std::max(bytes(gate_up_matrices), bytes(down_matrices)));
    gate_up = arena->Take<char>(rows * p.intermediate_size * 2 * ElementBytes(p.dtype));
    activated = arena->Take<char>(rows * p.intermediate_size * ElementBytes(p.dtype));
    y = arena->Take<float>(rows * p.hidden_size);
    router = arena->Take<char>(MoeRouterBytes(p));
  }
};

// Consecutive pairs: those of some experts.
class Wave {
 public:
  // Takes experts from `*expert` on and moves it to the one after the last taken.
  Wave(const MoeFfnParams& p, const Buffers& b, int32_t* expert) : p_(p), b_(b), first_pair_(b.pairs.first[*expert]) {
    for (const ExpertMatrices* m : {&b.gate_up_matrices, &b.down_matrices}) m->first_tile[0] = 0;
    for (; *expert < p.first_expert + p.num_local_experts; ++*expert) {
      const int32_t end = b.pairs.first[*expert + 1];
      const int32_t num_pairs = end - b.pairs.first[*expert];
      if (num_pairs == 0) continue;
      if (num_experts_ > 0 && end - first_pair_ > kWavePairs) break;
      b.experts[num_experts_] = *expert;
      for (const ExpertMatrices* m : {&b.gate_up_matrices, &b.down_matrices}) {
        m->first_tile[num_experts_ + 1] = m->first_tile[num_experts_] + m->blocking.NumTiles(num_pairs);
      }
      ++num_experts_;
    }
    end_pair_ = b.pairs.first[*expert];
  }

  void Run() const {
    ForEachTile(b_.gate_up_matrices, [&](int64_t e, int64_t tile) { PackX(e, tile); });
    Multiply(b_.gate_up_matrices, p_.dtype, b_.gate_up);
    ForEachTile(b_.down_matrices, [&](int64_t e, int64_t tile) { Activate(e, tile); });
    Multiply(b_.down_matrices, DType::kFloat32, b_.y);
    ParallelFor(p_.num_tokens, [&](int64_t token) { AddToken(token); });
  }

 private:
  // First row of the e-th expert of the wave.
  int64_t FirstRow(int64_t e) const { return b_.pairs.first[b_.experts[e]] - first_pair_; }

  PackedRows Rows(const ExpertMatrices& m, int64_t e) const {
    const int32_t* first = b_.pairs.first + b_.experts[e];
    const int64_t offset = FirstRow(e) * m.kernels.row_bytes(m.slices, m.format);
    return {m.kernels, m.blocking, m.slices, m.format, first[1] - first[0], b_.packed + offset};
  }

  // body(e, tile) for the tiles of all experts, on all threads.
  template <typename Body>
  void ForEachTile(const ExpertMatrices& m, Body&& body) const {
    ParallelFor(m.first_tile[num_experts_], [&](int64_t task) {
      int64_t e = 0;
      while (m.first_tile[e + 1] <= task) ++e;
      body(e, task - m.first_tile[e]);
    });
  }

  void PackX(int64_t e, int64_t tile) const {
    const PackedRows rows = Rows(b_.gate_up_matrices, e);
    const int32_t* tokens = b_.pairs.tokens + first_pair_ + FirstRow(e) + rows.Begin(tile);
    const XRows x{rows.format, p_.dtype, p_.hidden_size, p_.hidden_size, p_.x, tokens};
    rows.kernels->pack_tile(x, rows.slices, rows.Size(tile), 0, rows.slices.num_units(), rows.Tile(tile));
  }

  // What gate_up left is rounded to p.dtype, and so is swiglu's result, as in a dense layer.
  void Activate(int64_t e, int64_t tile) const {
    const int32_t inner = p_.intermediate_size;
    const PackedRows rows = Rows(b_.down_matrices, e);
    const int64_t row = FirstRow(e) + rows.Begin(tile);
    const char* gate_up = b_.gate_up + row * 2 * inner * ElementBytes(p_.dtype);
    char* activated = b_.activated + row * inner * ElementBytes(p_.dtype);
    const SwigluParams swiglu{rows.Size(tile), inner, p_.dtype, gate_up, activated};
    if (p_.experts.gate_limit > 0) {
      ClampedSwiglu(swiglu, p_.experts.gate_limit);
    } else {
      FDSD_ISA::Swiglu(swiglu);  // cannot fail: CheckMoe has seen the sizes
    }
    rows.kernels->pack_tile({rows.format, p_.dtype, inner, inner, activated, nullptr}, rows.slices, rows.Size(tile), 0,
                            rows.slices.num_units(), rows.Tile(tile));
  }

  // One pass over the panels of all experts: a thread reads a stretch of them from end to end.
  void Multiply(const ExpertMatrices& matrices, DType y_dtype, void* y) const {
    const int64_t num_panels = DivideUp(matrices.out_features, kPanelColumns);
    const int64_t panel_bytes = PanelBytes(matrices.slices, matrices.format);
    const int64_t row_bytes = matrices.out_features * ElementBytes(y_dtype);
    const auto multiply = [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t e = unit / num_panels;
        const int64_t panel = unit % num_panels;
        const PackedRows rows = Rows(matrices, e);
        const int64_t expert = b_.experts[e] - p_.first_expert;
        const float* bias = matrices.bias == nullptr ? nullptr : matrices.bias + expert * matrices.out_features;
        const LinearOutput out{y_dtype, matrices.out_features, bias, static_cast<char*>(y) + FirstRow(e) * row_bytes};
        matrices.kernels.multiply_panel(rows, 0, rows.num_tiles, matrices.Panel(expert, panel), panel, out);
      }
      matrices.kernels.leave();
    };
    ParallelRanges(num_experts_ * num_panels, DivideUp(kMinPieceBytes, panel_bytes), multiply, panel_bytes);
  }

  // The slice of the sum that a pair's expert is in.
  int64_t SliceOf(int64_t pair) const {
    int32_t slice = p_.num_slices - 1;
    while (pair < b_.pairs.first[p_.first_expert + HalvingBorder(p_.num_local_experts, p_.num_slices, 1, slice)]) {
      --slice;
    }
    return slice;
  }

  // Add the token's pairs in this wave to its sums, in order of the experts.
  void AddToken(int64_t token) const {
    for (int32_t k = 0; k < p_.router.top_k; ++k) {
      const int64_t pair = b_.pairs.token_pairs[token * p_.router.top_k + k];
      if (pair < first_pair_ || pair >= end_pair_) continue;
      float* sum = b_.sums + (SliceOf(pair) * p_.num_tokens + token) * p_.hidden_size;
      const float* y = b_.y + (pair - first_pair_) * p_.hidden_size;
      const F32x16 weight = Set1(b_.pairs.weights[pair]);
      for (int32_t i = 0; i < p_.hidden_size; i += kLanes) {
        const int n = std::min(kLanes, p_.hidden_size - i);
        StorePartial(Fma(weight, LoadPartial(y + i, n), LoadPartial(sum + i, n)), sum + i, n);
      }
    }
  }

  const MoeFfnParams& p_;
  const Buffers& b_;
  const int64_t first_pair_;
  int64_t end_pair_ = 0;
  int64_t num_experts_ = 0;
};

// 16 floats of every slice of a sum, added in their tree; a slice lies `stride` floats after the one before.
FDSD_INLINE F32x16 AddSlices(const float* sum, int32_t num_slices, int64_t stride, int n) {
  if (num_slices == 1) return LoadPartial(sum, n);
  const F32x16 left = Add(LoadPartial(sum, n), LoadPartial(sum + stride, n));
  if (num_slices == 2) return left;
  return Add(left, Add(LoadPartial(sum + 2 * stride, n), LoadPartial(sum + 3 * stride, n)));
}

template <typename T, typename Y>
void StoreRows(const MoeFfnParams& p, const Buffers& b) {
  const int64_t stride = int64_t{p.num_tokens} * p.hidden_size;
  ParallelFor(p.num_tokens, [&](int64_t token) {
    const float* sum = b.sums + token * p.hidden_size;
    const T* shared = p.shared == nullptr ? nullptr : static_cast<const T*>(p.shared) + token * p.hidden_size;
    Y* y = static_cast<Y*>(p.y) + token * p.hidden_size;
    for (int32_t i = 0; i < p.hidden_size; i += kLanes) {
      const int n = std::min(kLanes, p.hidden_size - i);
      F32x16 v = AddSlices(sum + i, p.num_slices, stride, n);
      if (shared != nullptr) v = Add(v, LoadPartial(shared + i, n));
      StorePartial(v, y + i, n);
    }
  });
}

template <typename T>
void StoreRowsAs(const MoeFfnParams& p, const Buffers& b) {
  if (p.y_dtype == DType::kFloat32) {
    StoreRows<T, float>(p, b);
  } else {
    StoreRows<T, bf16>(p, b);
  }
}

Error CheckMoe(const MoeFfnParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number, got 0 or less";
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (const Error error = CheckRouter(p.router, p.num_experts)) return error;
  if (p.num_slices != 1 && p.num_slices != 2 && p.num_slices != 4) {
    return "num_slices: expected 1, 2 or 4, got another number";
  }
  if (p.num_local_experts < 0 || p.first_expert < 0 || p.num_local_experts > p.num_experts - p.first_expert) {
    return "first_expert: expected experts within the router's num_experts, got others";
  }
  if (static_cast<int64_t>(p.num_tokens) * p.router.top_k > std::numeric_limits<int32_t>::max())
    return "num_tokens: expected at most 2^31 - 1 pairs of a token and an expert, got more";
  if (!(p.experts.gate_limit >= 0)) return "gate_limit: expected 0 (none) or a positive number, got another";
  for (const LinearFormat format : {p.experts.gate_up_format, p.experts.down_format}) {
    if (const Error error = CheckProcessorFormat(format)) return error;
  }
  const Error error =
      CheckLinear(p.hidden_size, p.intermediate_size, p.experts.gate_up_format, kWhole, p.experts.gate_up);
  if (error != nullptr) return error;
  return CheckLinear(p.intermediate_size, p.hidden_size, p.experts.down_format, kWhole, p.experts.down);
}

}  // namespace

Error MoeFfn(const MoeFfnParams& p) {
  if (const Error error = CheckMoe(p)) return error;
  Arena sizes(nullptr);
  Buffers(p, &sizes);
  Arena arena(ScratchArray<char>(Scratch::kOp, sizes.size()));
  const Buffers b(p, &arena);
  RouteTokens(p, b.pairs, b.router);
  std::memset(b.sums, 0,
              sizeof(float) * static_cast<size_t>(p.num_slices) * static_cast<size_t>(p.num_tokens) *
                  static_cast<size_t>(p.hidden_size));
  const int32_t end_pair = b.pairs.first[p.first_expert + p.num_local_experts];
  for (int32_t expert = p.first_expert; b.pairs.first[expert] < end_pair;) Wave(p, b, &expert).Run();
  if (p.dtype == DType::kFloat32) {
    StoreRowsAs<float>(p, b);
  } else {
    StoreRowsAs<bf16>(p, b);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
