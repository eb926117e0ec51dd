#pragma once
// Experts that run side by side over their rows: what moe_ffn and run_experts have in common.
#include <algorithm>

#include "fdsd/experts.h"
#include "linear_panel.h"
#include "scratch_arrays.h"

namespace fdsd {
namespace FDSD_ISA {

// Pairs that go through the experts together, unless one expert alone has more: all threads have work in every pass,
// and what the passes leave for each other stays in the caches.
constexpr int32_t kWavePairs = 512;

Error CheckExperts(const ExpertShape& shape);

// One of the two matrices of every expert, and how its rows of x are packed.
struct ExpertMatrices {
  LinearFormat format;
  int32_t in_features;
  int32_t out_features;
  Slices slices;
  const RowKernels& kernels;
  Blocking blocking;
  int32_t* first_tile = nullptr;  // [L + 1] of a wave's experts

  ExpertMatrices(LinearFormat format, int32_t in_features, int32_t out_features, int64_t rows_per_expert);
};

struct ExpertBuffers {
  ExpertMatrices gate_up_matrices;
  ExpertMatrices down_matrices;
  // One wave's: used experts in order, and the pairs of each as rows.
  int32_t* experts;  // [L]
  uint8_t* packed;   // [W] rows of x, then of the activations
  char* gate_up;     // [W, 2 * I]
  char* activated;   // [W, I]
  float* y;          // [W, H]

  // `most_pairs` of an expert, of `num_pairs` in all.
  ExpertBuffers(const RunExpertsParams& p, int64_t most_pairs, int64_t num_pairs, Arena* arena);
};

// Consecutive pairs: those of some experts.
class ExpertWave {
 public:
  // Takes experts from `*expert` on and moves it to the one after the last taken.
  ExpertWave(const RunExpertsParams& p, const ExpertBuffers& b, int32_t* expert);

  int64_t first_pair() const { return first_pair_; }
  int64_t end_pair() const { return end_pair_; }

  // What the experts make of the pairs' rows is then in y_rows of y or, where these are nullptr, in the buffers' y.
  void Run() const;

 private:
  // One of an expert's two, of all its rows.
  struct Product {
    const void* weights;
    LinearOutput out;
  };

  int64_t FirstRow(int64_t e) const;
  PackedRows Rows(const ExpertMatrices& m, int64_t e) const;
  template <typename Body>
  void ForEachTile(const ExpertMatrices& m, Body&& body) const;
  void PackX(int64_t e, int64_t tile) const;
  void Activate(int64_t e, int64_t tile) const;
  template <typename ProductOf>
  void Multiply(const ExpertMatrices& matrices, ProductOf&& product_of) const;
  bool IsInPlace(int64_t e) const;
  void PlaceRows() const;

  const RunExpertsParams& p_;
  const ExpertBuffers& b_;
  const int64_t first_pair_;
  int64_t end_pair_ = 0;
  int64_t num_experts_ = 0;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
