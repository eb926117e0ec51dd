#pragma once
// One head's state of a gated delta net, and what a row does to it.
#include <algorithm>
#include <cstring>

#include "simd.h"

namespace fdsd {
namespace FDSD_ISA {

// A tile is all rows of the state in some columns, as much as stays in the first cache while rows go through it.
#if defined(FDSD_SIMD_AVX512)
constexpr int kTileVectors = 2;
#else
constexpr int kTileVectors = 1;
#endif
constexpr int kTileColumns = kTileVectors * kLanes;

constexpr int64_t PaddedTo(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// A row's part in a head; vectors have zeros after their end.
struct DeltaRow {
  const float* q;
  const float* k;
  float k_dot_q;
  float decay;
  float beta;
};

// S = decay * S; u = beta * (v - S^T k); S = S + k u^T; o = S^T q in the columns of a tile. Sums over the state's rows
// are those of even rows plus those of odd ones.
//   tile    [key_dim, kTileColumns], key_dim is even
FDSD_INLINE void StepTile(const DeltaRow& row, int64_t key_dim, const float* v, float* tile, float* o) {
  F32x16 read[kTileVectors][2];
  F32x16 out[kTileVectors][2];
  for (int c = 0; c < kTileVectors; ++c) read[c][0] = read[c][1] = out[c][0] = out[c][1] = Set1(0.0f);
  for (int64_t i = 0; i < key_dim; i += 2) {
    for (int odd = 0; odd < 2; ++odd) {
      const F32x16 k = Set1(row.k[i + odd]);
      const F32x16 q = Set1(row.q[i + odd]);
      for (int c = 0; c < kTileVectors; ++c) {
        const F32x16 s = Load(tile + (i + odd) * kTileColumns + c * kLanes);
        read[c][odd] = Fma(s, k, read[c][odd]);
        out[c][odd] = Fma(s, q, out[c][odd]);
      }
    }
  }
  const F32x16 decay = Set1(row.decay);
  F32x16 update[kTileVectors];
  for (int c = 0; c < kTileVectors; ++c) {
    const F32x16 held = Mul(decay, Add(read[c][0], read[c][1]));
    update[c] = Mul(Set1(row.beta), Sub(Load(v + c * kLanes), held));
    Store(Fma(Set1(row.k_dot_q), update[c], Mul(decay, Add(out[c][0], out[c][1]))), o + c * kLanes);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    const F32x16 k = Set1(row.k[i]);
    for (int c = 0; c < kTileVectors; ++c) {
      float* const s = tile + i * kTileColumns + c * kLanes;
      Store(Fma(k, update[c], Mul(decay, Load(s))), s);
    }
  }
}

// Copies of a tile's columns from and to a state [key_dim, value_dim]; columns after its end are zeros in the tile.
struct TileColumns {
  int64_t key_dim;    // of the state; the tile may have a row of zeros more
  int64_t value_dim;  // of the state
  int64_t first;      // column of the state

  void Clear(float* tile) const {
    std::memset(tile, 0, static_cast<size_t>(PaddedTo(key_dim, 2)) * kTileColumns * sizeof(float));
  }

  void Load(const float* state, float* tile) const {
    if (is_ragged()) Clear(tile);
    EachVector([&](int64_t at, int64_t in_tile, int n) {
      const F32x16 s = n == kLanes ? FDSD_ISA::Load(state + at) : LoadPartial(state + at, n);
      FDSD_ISA::Store(s, tile + in_tile);
    });
  }

  void Store(const float* tile, float* state) const {
    EachVector([&](int64_t at, int64_t in_tile, int n) {
      const F32x16 s = FDSD_ISA::Load(tile + in_tile);
      n == kLanes ? FDSD_ISA::Store(s, state + at) : StorePartial(s, state + at, n);
    });
  }

 private:
  bool is_ragged() const { return key_dim % 2 != 0 || value_dim - first < kTileColumns; }

  // copy(place in the state, place in the tile, lanes) of all vectors.
  template <typename Copy>
  FDSD_INLINE void EachVector(const Copy& copy) const {
    for (int64_t i = 0; i < key_dim; ++i) {
      for (int c = 0; c < kTileColumns && first + c < value_dim; c += kLanes)
        copy(i * value_dim + first + c, i * kTileColumns + c,
             static_cast<int>(std::min<int64_t>(kLanes, value_dim - first - c)));
    }
  }
};

}  // namespace FDSD_ISA
}  // namespace fdsd
