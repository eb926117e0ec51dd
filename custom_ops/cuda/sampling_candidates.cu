// The plausible tokens of every row: a block has a row. Weights are integers, as in sampling.cu. A row is read twice.
// First each thread keeps the greatest of its logits; from these follows a bound that as many tokens reach as are
// wanted. Then the tokens from that bound on are listed, and decide. Where the list is too short for them, rows are
// read once for each 8 bits of a threshold.
#include <algorithm>

#include "fdsd/sampling.h"
#include "ops.h"
#include "philox.h"
#include "sampling_rows.h"
#include "tokens_in_order.h"

namespace fdsd::cuda {
namespace {

struct CandidateArrays {
  int32_t max_candidate_len;          // C
  int32_t list_len;                   // min(C, V)
  DevicePtr<int32_t> token_ids;       // [L, C]
  DevicePtr<int32_t> candidate_lens;  // [L]
  DevicePtr<Amount> lists;            // [L, list_len] places, in no order
  DevicePtr<Amount> ordered;          // [L, list_len] and best first
};

// What the candidates of a row weigh.
struct CandidateWeights {
  WeightMeasure measure;
  float lightest;  // logits under this one weigh nothing
  Amount total;    // of all tokens that min_p and top_k leave

  __device__ __forceinline__ Amount Of(float logit) const { return logit >= lightest ? measure(logit) : 0; }
};

// How many candidates are usable, and the token that is drawn of them: one thread, best first.
__device__ void DrawUsable(const SampleArrays& a, const SampledRow& row, const CandidateWeights& weights,
                           DevicePtr<const Amount> listed, int32_t count, const CandidateArrays& c) {
  const int32_t r = row.settings();
  const auto top_p = static_cast<double>(static_cast<float>(a.top_p[r]));
  const double u = PhiloxNumber(a.seed[r], static_cast<uint32_t>(static_cast<int32_t>(a.positions[row.index()])));
  const auto total = static_cast<double>(weights.total);
  int32_t usable = top_p >= 1.0 ? count : 0;
  int32_t drawn = -1;
  Amount running = 0;
  for (int32_t i = 0; i < count; ++i) {
    running += weights.Of(LogitOf(listed[i]));
    const auto share = static_cast<double>(running);
    if (drawn < 0 && share >= u * top_p * total) drawn = i;
    // A sum of probabilities counts as a float does: what is lost in it is no probability.
    if (top_p < 1.0 && static_cast<double>(static_cast<float>(share / total)) >= top_p) {
      usable = i + 1;
      break;
    }
  }
  c.candidate_lens[row.index()] = usable;
  a.token_ids[row.index()] = TokenOf(listed[drawn >= 0 && drawn < usable ? drawn : 0]);
}

// The greatest of a thread's logits.
struct OwnGreatest {
  static constexpr int kCount = 4;
  float values[kCount] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};

  __device__ __forceinline__ void Look(float logit) {
#pragma unroll
    for (float& value : values) {
      const float less = logit > value ? value : logit;
      value = logit > value ? logit : value;
      logit = less;
    }
  }
};
// Tokens of which a bound can be found.
constexpr int32_t kMaxWanted = OwnGreatest::kCount * kRowThreads;

// The row's first token in the order, and a logit that at least so many of its tokens reach, or all that are not -inf.
// All threads.
__device__ Best ReadBest(const SampledRow& row, int32_t wanted, float* bound) {
  FDSD_SHARED(float, greatest, kMaxWanted);
  OwnBest own;
  OwnGreatest own_greatest;
  row.ForEach([&](float logit, int32_t token) {
    own.Look(logit, token);
    own_greatest.Look(logit);
  });
#pragma unroll
  for (int i = 0; i < OwnGreatest::kCount; ++i)
    greatest[i * kRowThreads + static_cast<int>(threadIdx.x)] = own_greatest.values[i];
  const Best best = BestAt(BlockBest(own.place()));
  Kept kept{kLowest, kAllTied};
  if (best.token >= 0 && wanted < kMaxWanted) KeepFirst(LogitsInMemory{greatest, kMaxWanted}, wanted, &kept);
  *bound = kept.floor;
  return best;
}

// What is read of a row once its first token is known: the tokens from `bound` on, and the weight of all that reach
// `lightest`. All threads.
__device__ ListedTokens ReadListed(const SampledRow& row, float bound, float lightest, const WeightMeasure& measure,
                                   Amount* total) {
  FDSD_SHARED(Amount, places, kRowListed);
  FDSD_SHARED(int32_t, num_listed, 1);
  if (threadIdx.x == 0) num_listed[0] = 0;
  __syncthreads();
  Amount own = 0;
  row.ForEach([&](float logit, int32_t token) {
    if (logit >= lightest) own += measure(logit);
    if (!(logit >= bound)) return;
    const int32_t at = atomicAdd(num_listed + 0, 1);
    if (at < kRowListed) places[at] = PlaceOf(logit, token);
  });
  *total = BlockTotal(own);
  const int32_t count = num_listed[0];
  return ListedTokens{places, count > kRowListed ? -1 : count, KeyOf(bound)};
}

// What filters leave of a row, or of tokens among which that is: how many are listed, best first.
template <typename Row>
__device__ int32_t ListCandidates(const Row& tokens, Kept kept, int32_t top_k, const SampledRow& row,
                                  const CandidateArrays& c, CandidateWeights* weights) {
  if (top_k > 0) KeepFirst(tokens, top_k, &kept);
  const Kept weighed = weights->lightest > kept.floor ? Kept{weights->lightest, kAllTied} : kept;
  if (weights->total == 0) weights->total = TotalOf(tokens, weighed, weights->measure);
  KeepFirst(tokens, c.list_len, &kept);
  const auto count = static_cast<int32_t>(TotalOf(tokens, kept, CountMeasure()));
  const DevicePtr<int32_t> listed = c.token_ids + row.index() * c.max_candidate_len;
  const DevicePtr<Amount> ordered = c.ordered + row.index() * c.list_len;
  ListKept(tokens, kept, c.lists + row.index() * c.list_len, [&](int32_t i, Amount place) {
    ordered[i] = place;
    listed[i] = TokenOf(place);
  });
  return count;
}

// Block (row).
__global__ __launch_bounds__(kRowThreads, 2) void TopPCandidatesKernel(RuleArrays rules, SampleArrays a,
                                                                       CandidateArrays c) {
  const SampledRow row(rules, a, static_cast<int64_t>(blockIdx.x));
  const DrawSettings settings(a, row);
  const DevicePtr<int32_t> listed = c.token_ids + row.index() * c.max_candidate_len;
  const int32_t wanted = max(c.list_len, settings.top_k);
  float bound = kLowest;
  const Best best = ReadBest(row, wanted, &bound);
  const bool is_drawn = best.token >= 0 && settings.temperature > 0.0f;
  CandidateWeights weights{};
  int32_t count = best.token >= 0 ? 1 : 0;
  if (is_drawn) {
    const double log_min_p = log(static_cast<double>(settings.min_p));
    const Kept kept{LogitFloor(best.max, settings.temperature, log_min_p), kAllTied};
    weights.measure = WeightingOf(best.max, settings.temperature);
    weights.lightest = LightestLogit(best.max, settings.temperature);
    ListedTokens tokens{nullptr, -1, 0};
    if (wanted < kMaxWanted) {
      Amount total;
      tokens = ReadListed(row, fmaxf(bound, kept.floor), fmaxf(weights.lightest, kept.floor), weights.measure, &total);
      if (settings.top_k == 0) weights.total = total;
    }
    count = tokens.count >= 0 ? ListCandidates(tokens, kept, settings.top_k, row, c, &weights)
                              : ListCandidates(row, kept, settings.top_k, row, c, &weights);
  } else if (threadIdx.x == 0) {
    listed[0] = best.token;
    c.candidate_lens[row.index()] = count;
    a.token_ids[row.index()] = best.token;
  }
  const int32_t first_free = count > 0 ? count : 1;
  for (int32_t i = first_free + static_cast<int32_t>(threadIdx.x); i < c.max_candidate_len; i += kRowThreads)
    listed[i] = -1;
  __syncthreads();
  if (is_drawn && threadIdx.x == 0) DrawUsable(a, row, weights, c.ordered + row.index() * c.list_len, count, c);
}

}  // namespace

int64_t TopPCandidatesWorkspaceBytes(const TopPCandidatesParams& p) {
  const int64_t list_len = std::min(p.max_candidate_len, p.rows.vocab_size);
  return 2 * p.rows.num_rows * list_len * static_cast<int64_t>(sizeof(Amount));
}

Error TopPCandidates(const TopPCandidatesParams& p, void* workspace, Stream stream) {
  if (p.max_candidate_len <= 0) return "max_candidate_len: expected a positive number, got less";
  if (p.rows.stops_at_wrong_draft != 0)
    return "stops_at_wrong_draft: expected 0 where candidates are listed, got another";
  if (Error error = CheckSampleSizes(p.rows)) return error;
  const int32_t list_len = std::min(p.max_candidate_len, p.rows.vocab_size);
  const auto lists = DevicePtr<Amount>(workspace);
  const CandidateArrays candidates{p.max_candidate_len,
                                   list_len,
                                   DevicePtr<int32_t>(p.candidate_token_ids),
                                   DevicePtr<int32_t>(p.candidate_lens),
                                   lists,
                                   lists + static_cast<int64_t>(p.rows.num_rows) * list_len};
  const RuleArrays rules = RuleArraysOf(p.rows.rules, p.rows.drafted, p.rows.num_requests, p.rows.vocab_size);
  return Launch<TopPCandidatesKernel>(LaunchShape{dim3(static_cast<unsigned>(p.rows.num_rows)), dim3(kRowThreads)},
                                      stream, rules, SampleArraysOf(p.rows), candidates);
}

}  // namespace fdsd::cuda
