// Gated delta nets: a task is a value head of a request. Its rows go through in chunks: first what each row does to the
// state, then the state's columns, a tile at a time over all rows of the chunk.
#include "fdsd/gated_delta.h"

#include "gated_delta_check.h"
#include "gated_delta_head.h"
#include "gated_delta_rows.h"
#include "scratch_arrays.h"
#include "silu.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr int32_t kChunk = 64;
constexpr float kUnitEps = 1e-6f;
constexpr int kMaxWidth = 8;

template <typename T>
FDSD_INLINE F32x16 LoadUpTo(const T* p, int64_t n) {
  return n >= kLanes ? Load(p) : LoadPartial(p, static_cast<int>(n));
}

// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t)).
FDSD_INLINE F32x16 Softplus(F32x16 x) {
  const F32x16 zero = Set1(0.0f);
  const F32x16 t = Exp(Min(x, Sub(zero, x)));
  const F32x16 s = Div(t, Add(Set1(2.0f), t));
  const F32x16 square = Mul(s, s);
  F32x16 sum = Set1(2.0f / 13);
  for (int odd = 11; odd > 0; odd -= 2) sum = Fma(sum, square, Set1(2.0f / static_cast<float>(odd)));
  return Fma(sum, s, Max(zero, x));
}

FDSD_INLINE float Dot(const float* a, const float* b, int64_t padded) {
  F32x16 sum = Set1(0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) sum = Fma(Load(a + i), Load(b + i), sum);
  return ReduceAdd(sum);
}

// To unit length, times a factor; x has zeros up to its padded length.
FDSD_INLINE void ToUnit(float* x, int64_t padded, float factor) {
  const F32x16 scale = Set1(factor / std::sqrt(Dot(x, x, padded) + kUnitEps));
  for (int64_t i = 0; i < padded; i += kLanes) Store(Mul(Load(x + i), scale), x + i);
}

template <typename T>
class Head {
 public:
  Head(const GatedDeltaNetParams& p, const GatedDeltaSizes& sizes, int32_t r, int32_t head)
      : p_(p), sizes_(sizes), rows_(p, sizes, r), r_(r), head_(head) {
    Arena measured(nullptr);
    Take(measured);
    Arena arena(ScratchArray<char>(Scratch::kTask, measured.size()));
    Take(arena);
  }

  void Run() {
    const float* const source = rows_.source() < 0 ? nullptr : StateOf(rows_.source());
    for (int64_t t = 0; t < num_tiles_; ++t) {
      source == nullptr ? Columns(t).Clear(Tile(t)) : Columns(t).Load(source, Tile(t));
      if (rows_.num_kept() == 0 && rows_.source() != rows_.table_row())
        Columns(t).Store(Tile(t), StateOf(rows_.table_row()));
    }
    int32_t snapshot = p_.states.cu_snapshots[r_];
    for (int32_t begin = 0; begin < rows_.count(); begin += kChunk) {
      const int32_t end = std::min(begin + kChunk, rows_.count());
      Prepare(begin, end);
      int32_t next = snapshot;
      for (int64_t t = 0; t < num_tiles_; ++t) next = RunTile(t, begin, end, snapshot);
      snapshot = next;
      for (int32_t row = std::max(begin, rows_.num_replayed()); row < end; ++row) Finish(row, row - begin);
    }
  }

 private:
  void Take(Arena& arena) {
    key_width_ = PaddedTo(p_.heads.key_dim, kLanes);
    value_width_ = PaddedTo(p_.heads.value_dim, kTileColumns);
    num_tiles_ = value_width_ / kTileColumns;
    const int64_t count = std::min(kChunk, rows_.count());
    state_ = arena.Take<float>(PaddedTo(p_.heads.key_dim, 2) * value_width_);
    q_ = arena.Take<float>(count * key_width_);
    k_ = arena.Take<float>(count * key_width_);
    v_ = arena.Take<float>(count * value_width_);
    o_ = arena.Take<float>(count * value_width_);
    decay_ = arena.Take<float>(kChunk);
    beta_ = arena.Take<float>(kChunk);
    k_dot_q_ = arena.Take<float>(kChunk);
  }

  float* Tile(int64_t t) const { return state_ + t * PaddedTo(p_.heads.key_dim, 2) * kTileColumns; }
  TileColumns Columns(int64_t t) const { return {p_.heads.key_dim, p_.heads.value_dim, t * kTileColumns}; }
  float* StateOf(int64_t slot) const {
    return p_.memory.state + (slot * p_.heads.num_value_heads + head_) * sizes_.head_state;
  }

  // What the rows [begin, end) do to the state.
  void Prepare(int32_t begin, int32_t end) {
    const int64_t key_head = head_ / (p_.heads.num_value_heads / p_.heads.num_key_heads);
    const float q_factor = 1.0f / std::sqrt(static_cast<float>(p_.heads.key_dim));
    for (int32_t row = begin; row < end; ++row) {
      const int64_t i = row - begin;
      const T* taps[kMaxWidth];
      for (int j = 0; j < p_.conv_width; ++j) taps[j] = rows_.Raw(row - sizes_.history + j);
      float* const q = q_ + i * key_width_;
      float* const k = k_ + i * key_width_;
      Convolve(taps, key_head * p_.heads.key_dim, p_.heads.key_dim, q);
      Convolve(taps, sizes_.keys + key_head * p_.heads.key_dim, p_.heads.key_dim, k);
      std::memset(v_ + i * value_width_, 0, static_cast<size_t>(value_width_) * sizeof(float));
      Convolve(taps, 2 * sizes_.keys + head_ * int64_t{p_.heads.value_dim}, p_.heads.value_dim, v_ + i * value_width_);
      ToUnit(q, key_width_, q_factor);
      ToUnit(k, key_width_, 1.0f);
      k_dot_q_[i] = Dot(k, q, key_width_);
      beta_[i] = ToFloat(rows_.Gates(row)[head_]);
      decay_[i] = ToFloat(rows_.Gates(row)[p_.heads.num_value_heads + head_]);
    }
    const F32x16 rate = Sub(Set1(0.0f), Exp(Set1(p_.weights.a_log[head_])));
    const F32x16 bias = Set1(p_.weights.dt_bias[head_]);
    for (int32_t i = 0; i < end - begin; i += kLanes) {
      Store(Sigmoid(Load(beta_ + i)), beta_ + i);
      Store(Exp(Mul(rate, Softplus(Add(Load(decay_ + i), bias)))), decay_ + i);
    }
  }

  // silu of the convolution of some columns; writes zeros up to a multiple of kLanes.
  void Convolve(const T* const* taps, int64_t first, int64_t count, float* x) const {
    for (int64_t c = 0; c < count; c += kLanes) {
      F32x16 sum = Set1(0.0f);
      for (int j = 0; j < p_.conv_width; ++j) {
        if (taps[j] == nullptr) continue;
        const float* const weights = p_.weights.conv_weight + j * sizes_.qkv + first;
        sum = Fma(LoadUpTo(taps[j] + first + c, count - c), LoadUpTo(weights + c, count - c), sum);
      }
      Store(Silu(sum), x + c);
    }
  }

  // Returns the first snapshot that is after the rows.
  int32_t RunTile(int64_t t, int32_t begin, int32_t end, int32_t snapshot) const {
    const int64_t first = t * kTileColumns;
    const int32_t last_snapshot = p_.states.cu_snapshots[r_ + 1];
    for (int32_t row = begin; row < end; ++row) {
      const int64_t i = row - begin;
      const DeltaRow delta{q_ + i * key_width_, k_ + i * key_width_, k_dot_q_[i], decay_[i], beta_[i]};
      StepTile(delta, PaddedTo(p_.heads.key_dim, 2), v_ + i * value_width_ + first, Tile(t),
               o_ + i * value_width_ + first);
      if (snapshot < last_snapshot && p_.states.snapshot_ends[snapshot] == row + 1)
        Columns(t).Store(Tile(t), StateOf(p_.states.snapshot_slots[snapshot++]));
      if (row + 1 == rows_.num_kept()) Columns(t).Store(Tile(t), StateOf(rows_.table_row()));
    }
    return snapshot;
  }

  // y of a row of the step.
  void Finish(int32_t row, int64_t i) const {
    const float* const o = o_ + i * value_width_;
    const int64_t count = p_.heads.value_dim;
    const int64_t column = head_ * count;
    const float mean = Dot(o, o, value_width_) / static_cast<float>(count);
    const F32x16 scale = Set1(1.0f / std::sqrt(mean + p_.eps));
    const T* const z = rows_.Z(row) + column;
    T* const y = static_cast<T*>(p_.y) + (rows_.first() + row - rows_.num_replayed()) * sizes_.values + column;
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, count - c);
      const F32x16 normed = Mul(Mul(Load(o + c), scale), LoadUpTo(p_.weights.norm_weight + c, n));
      const F32x16 gated = Mul(normed, Silu(LoadUpTo(z + c, n)));
      n == kLanes ? Store(gated, y + c) : StorePartial(gated, y + c, static_cast<int>(n));
    }
  }

  const GatedDeltaNetParams& p_;
  const GatedDeltaSizes& sizes_;
  GatedDeltaRows<T> rows_;
  int32_t r_;
  int32_t head_;
  int64_t key_width_;
  int64_t value_width_;
  int64_t num_tiles_;
  float* state_;  // tile by tile
  float* q_;
  float* k_;
  float* v_;
  float* o_;
  float* decay_;
  float* beta_;
  float* k_dot_q_;
};

template <typename T>
void RunGatedDeltaNet(const GatedDeltaNetParams& p) {
  const GatedDeltaSizes sizes(p);
  const auto has_rows = [&](int64_t r) { return p.states.query_start_loc[r] < p.states.query_start_loc[r + 1]; };
  ParallelForRows(int64_t{p.num_requests} * p.heads.num_value_heads, 8 * sizes.head_state, [&](int64_t task) {
    const auto r = static_cast<int32_t>(task / p.heads.num_value_heads);
    if (has_rows(r)) Head<T>(p, sizes, r, static_cast<int32_t>(task % p.heads.num_value_heads)).Run();
  });
  // After all heads, which read the same rows of keys.
  const int64_t row_bytes = (sizes.history + 1) * sizes.qkv * static_cast<int64_t>(2 * sizeof(T));
  ParallelForRows(p.num_requests, row_bytes, [&](int64_t r) {
    if (!has_rows(r)) return;
    const GatedDeltaRows<T> rows(p, sizes, static_cast<int32_t>(r));
    for (int32_t i = p.states.cu_snapshots[r]; i < p.states.cu_snapshots[r + 1]; ++i)
      rows.StoreHistory(p.states.snapshot_ends[i], p.states.snapshot_slots[i]);
    rows.StoreHistory(rows.num_kept(), rows.table_row());
    rows.StoreDrafts();
  });
  const int64_t num_rows = p.states.query_start_loc[p.num_requests];
  std::memset(static_cast<T*>(p.y) + num_rows * sizes.values, 0,
              static_cast<size_t>((p.num_tokens - num_rows) * sizes.values) * sizeof(T));
}

}  // namespace

Error GatedDeltaNet(const GatedDeltaNetParams& p) {
  if (const Error error = CheckGatedDeltaSizes(p)) return error;
  if (const Error error = CheckGatedDeltaStates(p)) return error;
  if (p.dtype == DType::kFloat32) {
    RunGatedDeltaNet<float>(p);
  } else {
    RunGatedDeltaNet<bf16>(p);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
