#pragma once
// What drawing a token and listing the plausible ones share: the filters of a row, and the checks of their columns.
#include "fdsd/sampling.h"
#include "logits_row.h"

namespace fdsd {
namespace FDSD_ISA {

// The smallest float x with x >= max + temperature * log_ratio: logits from there on weigh exp(log_ratio) or more.
inline float LogitFloor(float max, float temperature, double log_ratio) {
  const double exact = max + temperature * log_ratio;
  if (exact < std::numeric_limits<float>::lowest()) return std::numeric_limits<float>::lowest();
  const float near = static_cast<float>(exact);
  return near >= exact ? near : std::nextafter(near, kInf);
}

inline LogitsScan ScanOf(const SampleParams& p) {
  return LogitsScan(p.logits, p.num_rows, p.vocab_size, p.processed, p.processed_row);
}

// One row's settings, with the filters that cannot remove anything switched off.
struct RowPlan {
  bool is_settled;  // token_ids holds the row's token, as temperature is 0, or -1; nothing else is set
  int top_k;        // 0 = off
  double top_p;
  double u;
  Weighting weighting;  // floor = what min_p keeps

  bool draws_from_all() const { return top_k == 0 && top_p >= 1.0; }
};

inline RowPlan PlanOf(const SampleParams& p, int64_t row, float max) {
  const int32_t r = p.batch_id_per_output[row];
  RowPlan plan;
  plan.is_settled = false;
  plan.top_k = p.top_k[r] < p.vocab_size ? p.top_k[r] : 0;
  plan.top_p = p.top_p[r];
  plan.u = PhiloxUniform(p.seed[r], static_cast<uint32_t>(p.positions[row]));
  const double log_min_p = std::log(static_cast<double>(p.min_p[r]));
  plan.weighting = Weighting{max, p.temperature[r], LogitFloor(max, p.temperature[r], log_min_p)};
  return plan;
}

// The plan of every row, with the maximum or -1 written to token_ids, and the weight of every chunk of the rows that
// are not settled and have no top_k. Lives in Scratch::kRows until the op ends.
inline const RowPlan* PlanRows(const SampleParams& p, const LogitsScan& scan) {
  RowPlan* plans = ScratchArray<RowPlan>(Scratch::kRows, p.num_rows);
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const Chunk whole = scan.Whole(row);
    const bool is_valid = whole.is_valid && whole.max > -kInf;
    p.token_ids[row] = is_valid ? whole.argmax : -1;
    if (is_valid && p.temperature[p.batch_id_per_output[row]] > 0.0f) {
      plans[row] = PlanOf(p, row, whole.max);
    } else {
      plans[row].is_settled = true;
    }
  }
  scan.ForChunks([&](int64_t row, int begin, int end, Chunk* chunk) {
    if (plans[row].is_settled || plans[row].top_k > 0) return;
    chunk->weight = SumWeights(scan.row(row) + begin, end - begin, plans[row].weighting);
  });
  return plans;
}

inline void WeighCandidates(const Weighting& weighting, Candidate* candidates, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const int n = std::min(kLanes, count - i);
    alignas(64) float logits[kLanes];
    alignas(64) float weights[kLanes];
    for (int j = 0; j < n; ++j) logits[j] = candidates[i + j].logit;
    Weigh(logits, n, weighting, weights);
    for (int j = 0; j < n; ++j) candidates[i + j].weight = weights[j];
  }
}

inline double SumOf(const Candidate* candidates, int begin, int end) {
  double sum = 0.0;
  for (int i = begin; i < end; ++i) sum += candidates[i].weight;
  return sum;
}

// Remove what comes after `last`; the rest stays in place, by id.
inline int KeepUpTo(const Candidate& last, Candidate* candidates, int count) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    candidates[kept] = candidates[i];
    kept += !IsBefore()(last, candidates[i]);
  }
  return kept;
}

inline int KeepTopK(int k, Candidate* candidates, int count, Candidate* scratch) {
  if (count <= k) return count;
  std::memcpy(scratch, candidates, static_cast<size_t>(count) * sizeof(Candidate));
  std::nth_element(scratch, scratch + (k - 1), scratch + count, IsBefore());
  return KeepUpTo(scratch[k - 1], candidates, count);
}

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
