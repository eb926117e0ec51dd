#include "sampling_filter.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Up to this many tokens the end of the nucleus is found by sorting.
constexpr int kSortTokens = 32;
// Tokens are told apart by (max - logit) / temperature in steps of 1/32 down to 32; deeper ones count as equally deep.
constexpr int kDepths = 1024;
constexpr float kDepthsPerUnit = 32.0f;
// Weights carry the rounding of an exponent of up to 87, a relative error below 2^-16; a bound on one is widened by
// this much in its logarithm.
constexpr double kWeightSlack = 2e-5;

// Last token of the shortest prefix, in the order, that makes `before` reach `target`. Halves the interval that holds
// the prefix's end, sorting none of what lies outside it. Reorders the candidates.
Candidate EndOfPrefix(Candidate* candidates, int count, double before, double target) {
  int begin = 0;
  int end = count;
  while (end - begin > kSortTokens) {
    const int middle = begin + (end - begin) / 2;
    std::nth_element(candidates + begin, candidates + middle, candidates + end, IsBefore());
    const double half = SumOf(candidates, begin, middle);
    if (before + half >= target) {
      end = middle;
    } else {
      before += half;
      begin = middle;
    }
  }
  std::sort(candidates + begin, candidates + end, IsBefore());
  for (int i = begin; i < end; ++i) {
    before += candidates[i].weight;
    if (before >= target) return candidates[i];
  }
  return candidates[end - 1];
}

// How far a token lies below the maximum, in steps; never smaller for a token later in the order.
FDSD_INLINE int DepthOf(const Weighting& weighting, const Candidate& candidate) {
  const float depth = (weighting.max - candidate.logit) / weighting.temperature * kDepthsPerUnit;
  return static_cast<int>(std::min(depth, static_cast<float>(kDepths - 1)));
}

// Last token of the nucleus: the shortest prefix, in the order, that weighs `target` or more. Weights are added up by
// depth first, so that only the tokens of the depth where the prefix ends need to be put in order.
Candidate EndOfNucleus(const Weighting& weighting, const Candidate* candidates, int count, double target,
                       Candidate* scratch) {
  double weights[kDepths] = {};
  for (int i = 0; i < count; ++i) weights[DepthOf(weighting, candidates[i])] += candidates[i].weight;
  double before = 0.0;  // weight above `depth`, the last one seen with any
  int depth = 0;
  for (int d = 0; d < kDepths && before + weights[depth] < target; ++d) {
    if (d == depth || weights[d] == 0.0) continue;
    before += weights[depth];
    depth = d;
  }
  int num_there = 0;
  for (int i = 0; i < count; ++i) {
    scratch[num_there] = candidates[i];
    num_there += DepthOf(weighting, candidates[i]) == depth;
  }
  return EndOfPrefix(scratch, num_there, before, target);
}

// First token whose running weight exceeds u times the whole; a token without weight is never drawn. Where rounding
// lets no token exceed it, the last one with weight.
int32_t Draw(const Candidate* candidates, int count, double u) {
  const double target = u * SumOf(candidates, 0, count);
  double running = 0.0;
  int32_t drawn = -1;
  for (int i = 0; i < count && running <= target; ++i) {
    running += candidates[i].weight;
    if (candidates[i].weight > 0.0f) drawn = candidates[i].id;
  }
  return drawn;
}

// The tokens that top_k or, where it is off, top_p may keep; `total` is the weight of the row.
// A token t lighter than (1 - top_p) / V of the total is outside the nucleus: t and all after it are at most V tokens,
// none heavier than t, so together they weigh less than 1 - top_p of the total; the tokens before t therefore already
// weigh more than top_p of it, and the shortest prefix that does ends before t.
int CollectKept(const LogitsScan& scan, int64_t row, const RowPlan& plan, double total, Candidate* candidates) {
  const Weighting& weighting = plan.weighting;
  float floor = weighting.floor;
  if (plan.top_k > 0) {
    // Room for the group maxima after the candidates of the whole vocabulary.
    float* scratch = reinterpret_cast<float*>(candidates + scan.vocab_size());
    floor = std::max(floor, FloorOfTop(scan.group_max(row), scan.num_groups(), plan.top_k, scratch));
  } else {
    const double log_bound = std::log((1.0 - plan.top_p) * total / scan.vocab_size()) - kWeightSlack;
    floor = std::max(floor, LogitFloor(weighting.max, weighting.temperature, log_bound));
  }
  const int count = Collect(scan, row, floor, candidates);
  WeighCandidates(weighting, candidates, count);
  return count;
}

// Draw from what top_k and top_p keep. `total` is the weight of the row, used when top_k is off.
int32_t SampleKept(const LogitsScan& scan, int64_t row, const RowPlan& plan, double total) {
  Candidate* candidates = ScratchArray<Candidate>(Scratch::kTask, 2 * static_cast<int64_t>(scan.vocab_size()));
  Candidate* scratch = candidates + scan.vocab_size();
  int count = CollectKept(scan, row, plan, total, candidates);
  if (plan.top_k > 0) {
    count = KeepTopK(plan.top_k, candidates, count, scratch);
    total = SumOf(candidates, 0, count);
  }
  if (plan.top_p < 1.0) {
    const Candidate last = EndOfNucleus(plan.weighting, candidates, count, plan.top_p * total, scratch);
    count = KeepUpTo(last, candidates, count);
  }
  return Draw(candidates, count, plan.u);
}

// Draw from all tokens that min_p keeps: find the chunk by the weights of the chunks, then the token in it.
int32_t SampleAll(const LogitsScan& scan, int64_t row, const RowPlan& plan, double total) {
  const double target = plan.u * total;
  const Chunk* chunks = scan.chunks(row);
  double running = 0.0;  // weight before `chosen`, the last chunk with any weight seen
  int chosen = 0;
  for (int c = 0; c < scan.num_chunks() && running + chunks[chosen].weight <= target; ++c) {
    if (c == chosen || chunks[c].weight == 0.0) continue;
    running += chunks[chosen].weight;
    chosen = c;
  }
  const float* logits = scan.row(row);
  const int end = std::min((chosen + 1) * kChunkTokens, scan.vocab_size());
  int32_t drawn = -1;
  for (int i = chosen * kChunkTokens; i < end && running <= target; i += kLanes) {
    alignas(64) float weights[kLanes];
    Weigh(logits + i, end - i, plan.weighting, weights);
    for (int lane = 0; lane < kLanes && running <= target; ++lane) {
      running += weights[lane];
      if (weights[lane] > 0.0f) drawn = i + lane;
    }
  }
  return drawn;
}

}  // namespace

Error Sample(const SampleParams& p) {
  if (Error error = CheckSampleParams(p)) return error;
  if (p.num_rows <= 0) return nullptr;
  const LogitsScan scan = ScanOf(p);
  const RowPlan* plans = PlanRows(p, scan);
  ParallelFor(p.num_rows, [&](int64_t row) {
    const RowPlan& plan = plans[row];
    if (plan.is_settled) return;
    const double total = scan.Whole(row).weight;
    p.token_ids[row] = plan.draws_from_all() ? SampleAll(scan, row, plan, total) : SampleKept(scan, row, plan, total);
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
