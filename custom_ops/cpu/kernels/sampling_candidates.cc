#include "sampling_filter.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// The most likely tokens of a row that min_p and top_k leave, best first.
struct Candidates {
  const Candidate* tokens;
  int count;
  double total;  // weight of all tokens that min_p and top_k leave
};

// `total` is the weight of the row, used when top_k is off.
Candidates BestCandidates(const LogitsScan& scan, int64_t row, const RowPlan& plan, double total,
                          int max_candidate_len) {
  Candidate* tokens = ScratchArray<Candidate>(Scratch::kTask, 2 * static_cast<int64_t>(scan.vocab_size()));
  Candidate* scratch = tokens + scan.vocab_size();
  const int num_wanted = plan.top_k > 0 ? plan.top_k : max_candidate_len;
  const float reached =
      FloorOfTop(scan.group_max(row), scan.num_groups(), num_wanted, reinterpret_cast<float*>(scratch));
  int count = Collect(scan, row, std::max(plan.weighting.floor, reached), tokens);
  if (plan.top_k > 0) {
    count = KeepTopK(plan.top_k, tokens, count, scratch);
    WeighCandidates(plan.weighting, tokens, count);
    total = SumOf(tokens, 0, count);
  }
  const int num_best = std::min(count, max_candidate_len);
  std::partial_sort(tokens, tokens + num_best, tokens + count, IsBefore());
  WeighCandidates(plan.weighting, tokens, num_best);
  return Candidates{tokens, num_best, total};
}

// Length of the usable prefix. A sum of probabilities counts as a float does: what is lost in it is no probability.
int UsableLength(const Candidates& candidates, double top_p) {
  double running = 0.0;
  for (int i = 0; i < candidates.count; ++i) {
    running += candidates.tokens[i].weight;
    if (static_cast<float>(running / candidates.total) >= top_p) return i + 1;
  }
  return top_p >= 1.0 ? candidates.count : 0;
}

int32_t DrawUsable(const Candidates& candidates, int length, double u_top_p) {
  const double target = u_top_p * candidates.total;
  double running = 0.0;
  for (int i = 0; i < length; ++i) {
    running += candidates.tokens[i].weight;
    if (running >= target) return candidates.tokens[i].id;
  }
  return candidates.tokens[0].id;
}

Error CheckAll(const TopPCandidatesParams& p) {
  if (p.max_candidate_len <= 0) return "max_candidate_len: expected a positive number, got less";
  return CheckSampleParams(p.rows);
}

}  // namespace

Error TopPCandidates(const TopPCandidatesParams& p) {
  if (Error error = CheckAll(p)) return error;
  if (p.rows.num_rows <= 0) return nullptr;
  const LogitsScan scan = ScanOf(p.rows);
  const RowPlan* plans = PlanRows(p.rows, scan);
  ParallelFor(p.rows.num_rows, [&](int64_t row) {
    const RowPlan& plan = plans[row];
    int32_t* token_ids = p.candidate_token_ids + row * p.max_candidate_len;
    std::fill(token_ids, token_ids + p.max_candidate_len, -1);
    if (plan.is_settled) {
      token_ids[0] = p.rows.token_ids[row];
      p.candidate_lens[row] = token_ids[0] >= 0;
      return;
    }
    const Candidates found = BestCandidates(scan, row, plan, scan.Whole(row).weight, p.max_candidate_len);
    for (int i = 0; i < found.count; ++i) token_ids[i] = found.tokens[i].id;
    p.candidate_lens[row] = UsableLength(found, plan.top_p);
    p.rows.token_ids[row] = DrawUsable(found, p.candidate_lens[row], plan.u * plan.top_p);
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
