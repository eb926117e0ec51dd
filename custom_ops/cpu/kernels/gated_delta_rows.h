#pragma once
// The rows of a request in a gated delta net: those replayed from its drafts, then the step's.
#include <cstring>

#include "fdsd/gated_delta.h"
#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

struct GatedDeltaSizes {
  explicit GatedDeltaSizes(const GatedDeltaNetParams& p)
      : keys(int64_t{p.heads.num_key_heads} * p.heads.key_dim),
        values(int64_t{p.heads.num_value_heads} * p.heads.value_dim),
        qkv(2 * keys + values),
        qkvz(qkv + values),
        gates(int64_t{2} * p.heads.num_value_heads),
        history(p.conv_width - 1),
        head_state(int64_t{p.heads.key_dim} * p.heads.value_dim) {}

  int64_t keys;        // columns of k, and of q
  int64_t values;      // columns of v, and of z
  int64_t qkv;         // q | k | v
  int64_t qkvz;        // q | k | v | z
  int64_t gates;       // b | a
  int64_t history;     // rows before the first that a convolution reads
  int64_t head_state;  // numbers in a head's state
};

template <typename T>
class GatedDeltaRows {
 public:
  GatedDeltaRows(const GatedDeltaNetParams& p, const GatedDeltaSizes& sizes, int32_t r)
      : sizes_(sizes),
        table_row_(p.states.table_rows[r]),
        source_(p.states.source[r]),
        first_(p.states.query_start_loc[r]),
        num_new_(p.states.query_start_loc[r + 1] - first_),
        num_replayed_(p.states.num_replayed[r]),
        num_certain_(p.states.num_certain[r]),
        qkvz_(static_cast<const T*>(p.qkvz) + first_ * sizes.qkvz),
        ba_(static_cast<const T*>(p.ba) + first_ * sizes.gates),
        conv_rows_(static_cast<T*>(p.memory.conv_rows)),
        drafts_(static_cast<T*>(p.memory.draft_rows) + int64_t{table_row_} * p.max_drafts * (sizes.qkv + sizes.gates)) {
  }

  int32_t table_row() const { return table_row_; }
  int32_t source() const { return source_; }
  int64_t first() const { return first_; }  // row of the step
  int32_t num_replayed() const { return num_replayed_; }
  int32_t count() const { return num_replayed_ + num_new_; }
  int32_t num_kept() const { return num_replayed_ + num_certain_; }  // rows in the state that is written

  // q | k | v before the convolution; of a row before the first from the state, nullptr where it has none.
  const T* Raw(int64_t row) const {
    if (row >= num_replayed_) return qkvz_ + (row - num_replayed_) * sizes_.qkvz;
    if (row >= 0) return Draft(row);
    return source_ < 0 ? nullptr : conv_rows_ + (source_ * sizes_.history + sizes_.history + row) * sizes_.qkv;
  }

  // b | a
  const T* Gates(int64_t row) const {
    return row >= num_replayed_ ? ba_ + (row - num_replayed_) * sizes_.gates : Draft(row) + sizes_.qkv;
  }

  const T* Z(int64_t row) const { return qkvz_ + (row - num_replayed_) * sizes_.qkvz + sizes_.qkv; }

  // Store the raw rows that a state after `end` rows needs. Slot `source` is written last of all.
  void StoreHistory(int64_t end, int64_t slot) const {
    if (end == 0 && slot == source_) return;
    const auto bytes = static_cast<size_t>(sizes_.qkv) * sizeof(T);
    for (int64_t j = 0; j < sizes_.history; ++j) {
      T* const to = conv_rows_ + (slot * sizes_.history + j) * sizes_.qkv;
      const T* const from = Raw(end - sizes_.history + j);
      from == nullptr ? std::memset(to, 0, bytes) : std::memcpy(to, from, bytes);
    }
  }

  // After what reads replayed rows.
  void StoreDrafts() const {
    for (int64_t row = num_kept(); row < count(); ++row) {
      T* const to = drafts_ + (row - num_kept()) * (sizes_.qkv + sizes_.gates);
      std::memcpy(to, Raw(row), static_cast<size_t>(sizes_.qkv) * sizeof(T));
      std::memcpy(to + sizes_.qkv, Gates(row), static_cast<size_t>(sizes_.gates) * sizeof(T));
    }
  }

 private:
  const T* Draft(int64_t row) const { return drafts_ + row * (sizes_.qkv + sizes_.gates); }

  const GatedDeltaSizes& sizes_;
  int32_t table_row_;
  int32_t source_;
  int64_t first_;
  int32_t num_new_;
  int32_t num_replayed_;
  int32_t num_certain_;
  const T* qkvz_;
  const T* ba_;
  T* conv_rows_;
  T* drafts_;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
