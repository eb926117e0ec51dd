#pragma once
// What drawing a token and listing the plausible ones share: the settings of a row, and the checks of their columns.
#include "fdsd/sampling.h"
#include "logits_cut.h"

namespace fdsd {
namespace FDSD_ISA {

// One row's settings, with the filters that cannot remove anything switched off.
struct RowPlan {
  int top_k;  // 0 = off
  double top_p;
  double u;
  float temperature;
  Weighting weighting;
  Kept kept;       // what min_p leaves
  float lightest;  // logits under this one weigh nothing
};

inline RowPlan PlanOf(const SampleParams& p, int64_t row, float max) {
  const int32_t r = p.batch_id_per_output[row];
  const double log_min_p = std::log(static_cast<double>(p.min_p[r]));
  return RowPlan{p.top_k[r] < p.vocab_size ? p.top_k[r] : 0,
                 p.top_p[r],
                 PhiloxUniform(p.seed[r], static_cast<uint32_t>(p.positions[row])),
                 p.temperature[r],
                 WeightingOf(max, p.temperature[r]),
                 Kept{LogitFloor(max, p.temperature[r], log_min_p), kAllTied},
                 LightestLogit(max, p.temperature[r])};
}

// The row of logits, or the one that replaces it.
inline const float* LogitsOf(const SampleParams& p, int64_t row) {
  if (p.processed_row == nullptr || p.processed_row[row] < 0) return p.logits + row * p.vocab_size;
  return p.processed + static_cast<int64_t>(p.processed_row[row]) * p.vocab_size;
}

inline bool IsGreedy(const SampleParams& p, int64_t row) { return p.temperature[p.batch_id_per_output[row]] == 0.0f; }

inline Error CheckSampleParams(const SampleParams& p) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (!(p.temperature[r] >= 0.0f && p.temperature[r] < kInf))
      return "temperature: expected a finite number >= 0, got another";
    if (p.top_k[r] < 0) return "top_k: expected >= 0, got a negative number";
    if (!(p.top_p[r] > 0.0f && p.top_p[r] <= 1.0f)) return "top_p: expected a number in (0, 1], got another";
    if (!(p.min_p[r] >= 0.0f && p.min_p[r] <= 1.0f)) return "min_p: expected a number in [0, 1], got another";
  }
  for (int32_t i = 0; i < p.num_rows; ++i) {
    const int32_t r = p.batch_id_per_output[i];
    if (r < 0 || r >= p.num_requests)
      return "batch_id_per_output: expected rows of the request columns, got one outside";
    if (p.positions[i] < 0) return "positions: expected >= 0, got a negative position";
    if (p.processed_row != nullptr && (p.processed_row[i] < -1 || p.processed_row[i] >= p.num_processed))
      return "processed_row: expected rows of processed or -1, got one outside";
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
