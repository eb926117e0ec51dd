// The router: logits of all experts, their probabilities, the best top_k of each token.
#include "moe_router.h"

#include "linear_layout.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// The logits of a token are padded to whole vectors.
int64_t PaddedExperts(const RouterInput& p) { return DivideUp(p.num_experts, kLanes) * kLanes; }

struct RouterBuffers {
  float* logits;        // [T, padded E]
  float* scores;        // [T, padded E], by which experts are chosen
  int32_t* expert_ids;  // [T, top_k]
  float* weights;       // [T, top_k]
  int32_t* next_pair;   // [E]
  int32_t* num_pairs;   // [T]

  RouterBuffers(const RouterInput& p, Arena* arena) {
    const int64_t tokens = p.num_tokens;
    logits = arena->Take<float>(tokens * PaddedExperts(p));
    scores = arena->Take<float>(tokens * PaddedExperts(p));
    expert_ids = arena->Take<int32_t>(tokens * p.router.top_k);
    weights = arena->Take<float>(tokens * p.router.top_k);
    next_pair = arena->Take<int32_t>(p.num_experts);
    num_pairs = arena->Take<int32_t>(tokens);
  }
};

// Experts scored side by side: one alone would wait for its own sum at every step.
constexpr int kExpertsAtOnce = 4;

// Logits of experts [expert, expert + kExperts) for one token.
template <typename T, int kExperts>
FDSD_INLINE void ScoreExperts(const RouterInput& p, const T* x, int64_t expert, float* logits) {
  const float* weight = p.router.router_weight + expert * p.hidden_size;
  F32x16 sum[kExperts];
  for (F32x16& s : sum) s = Set1(0.0f);
  int32_t i = 0;
  for (; i + kLanes <= p.hidden_size; i += kLanes) {
    const F32x16 v = Load(x + i);
    for (int e = 0; e < kExperts; ++e) {
      sum[e] = Fma(v, Load(weight + static_cast<int64_t>(e) * p.hidden_size + i), sum[e]);
    }
  }
  const int rest = p.hidden_size - i;
  for (int e = 0; e < kExperts; ++e) {
    const float* last = weight + static_cast<int64_t>(e) * p.hidden_size + i;
    if (rest > 0) sum[e] = Fma(LoadPartial(x + i, rest), LoadPartial(last, rest), sum[e]);
    logits[expert + e] = ReduceAdd(sum[e]);
  }
}

// A task scores 16 experts for every token: their weights are read once.
template <typename T>
void ComputeLogits(const RouterInput& p, const RouterBuffers& b) {
  const int64_t padded = PaddedExperts(p);
  ParallelFor(padded / kLanes, [&](int64_t task) {
    const int64_t begin = task * kLanes;
    const int64_t end = std::min<int64_t>(begin + kLanes, p.num_experts);
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      const T* x = static_cast<const T*>(p.x) + token * p.hidden_size;
      float* logits = b.logits + token * padded;
      int64_t e = begin;
      for (; e + kExpertsAtOnce <= end; e += kExpertsAtOnce) ScoreExperts<T, kExpertsAtOnce>(p, x, e, logits);
      for (; e < end; ++e) ScoreExperts<T, 1>(p, x, e, logits);
      if (p.router.router_bias != nullptr) {
        for (int64_t i = begin; i < end; ++i) logits[i] += p.router.router_bias[i];
      }
      for (; e < begin + kLanes; ++e) logits[e] = -std::numeric_limits<float>::infinity();
    }
  });
}

// Logits become probabilities in place.
void Softmax(float* logits, int64_t count) {
  F32x16 max = Set1(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i += kLanes) max = Max(max, Load(logits + i));
  const F32x16 shift = Set1(ReduceMax(max));
  F32x16 total = Set1(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32x16 e = Exp(Sub(Load(logits + i), shift));
    Store(e, logits + i);
    total = Add(total, e);
  }
  const F32x16 sum = Set1(ReduceAdd(total));
  for (int64_t i = 0; i < count; i += kLanes) Store(Div(Load(logits + i), sum), logits + i);
}

void Sigmoid(float* logits, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32x16 e = Exp(Sub(Set1(0.0f), Load(logits + i)));
    Store(Div(Set1(1.0f), Add(Set1(1.0f), e)), logits + i);
  }
}

// The best of `count` scores, the first among equals, and not one that was taken. NaN loses to every other; one is
// always found.
int32_t Best(const float* scores, int32_t count, const int32_t* taken, int32_t num_taken) {
  int32_t best = -1;
  float best_score = 0.0f;
  for (int32_t e = 0; e < count; ++e) {
    bool is_taken = false;
    for (int32_t i = 0; i < num_taken; ++i) is_taken |= taken[i] == e;
    if (is_taken) continue;
    if (best < 0 || scores[e] > best_score || (std::isnan(best_score) && !std::isnan(scores[e]))) {
      best = e;
      best_score = scores[e];
    }
  }
  return best;
}

// Experts outside of the chosen groups get the lowest score of all.
void ExcludeGroups(const RouterInput& p, float* scores) {
  const int32_t num_groups = p.router.num_groups;
  const int32_t size = p.num_experts / num_groups;
  float sums[kMaxExpertGroups];
  for (int32_t g = 0; g < num_groups; ++g) {
    const float* own = scores + int64_t{g} * size;
    const int32_t first = Best(own, size, nullptr, 0);
    sums[g] = own[first] + own[Best(own, size, &first, 1)];
  }
  int32_t chosen[kMaxExpertGroups];
  bool is_chosen[kMaxExpertGroups] = {};
  for (int32_t i = 0; i < p.router.num_chosen_groups; ++i) {
    chosen[i] = Best(sums, num_groups, chosen, i);
    is_chosen[chosen[i]] = true;
  }
  for (int32_t e = 0; e < p.num_experts; ++e) {
    if (!is_chosen[e / size]) scores[e] = std::numeric_limits<float>::quiet_NaN();
  }
}

void RouteToken(const RouterInput& p, const RouterBuffers& b, int64_t token, int32_t* ids, float* weights) {
  const int64_t padded = PaddedExperts(p);
  float* probs = b.logits + token * padded;
  float* scores = b.scores + token * padded;
  if (p.router.sigmoid != 0) {
    Sigmoid(probs, padded);
  } else {
    Softmax(probs, padded);
  }
  for (int32_t e = 0; e < p.num_experts; ++e) {
    scores[e] = p.router.selection_bias == nullptr ? probs[e] : probs[e] + p.router.selection_bias[e];
  }
  if (p.router.num_chosen_groups < p.router.num_groups) ExcludeGroups(p, scores);
  float sum = 0.0f;
  for (int32_t i = 0; i < p.router.top_k; ++i) {
    ids[i] = Best(scores, p.num_experts, ids, i);
    weights[i] = probs[ids[i]];
    sum += weights[i];
  }
  const float floored = sum > p.router.norm_min || std::isnan(sum) ? sum : p.router.norm_min;
  const float divisor = p.router.normalize != 0 ? floored : 1.0f;
  for (int32_t i = 0; i < p.router.top_k; ++i) weights[i] = weights[i] / divisor * p.router.scale;
}

// Number the pairs by expert.
void NumberPairs(const RouterInput& p, const RouterBuffers& b, const MoePairs& pairs) {
  const int64_t num_pairs = static_cast<int64_t>(p.num_tokens) * p.router.top_k;
  std::memset(b.next_pair, 0, sizeof(int32_t) * static_cast<size_t>(p.num_experts));
  for (int64_t i = 0; i < num_pairs; ++i) ++b.next_pair[b.expert_ids[i]];
  pairs.first[0] = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    pairs.first[e + 1] = pairs.first[e] + b.next_pair[e];
    b.next_pair[e] = pairs.first[e];
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t pair = b.next_pair[b.expert_ids[i]]++;
    pairs.tokens[pair] = static_cast<int32_t>(i / p.router.top_k);
    pairs.weights[pair] = b.weights[i];
  }
  std::memset(b.num_pairs, 0, sizeof(int32_t) * static_cast<size_t>(p.num_tokens));
  for (int32_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t token = pairs.tokens[pair];
    pairs.token_pairs[token * p.router.top_k + b.num_pairs[token]++] = pair;
  }
}

}  // namespace

MoePairs::MoePairs(const RouterInput& p, Arena* arena) {
  const int64_t num_pairs = static_cast<int64_t>(p.num_tokens) * p.router.top_k;
  first = arena->Take<int32_t>(p.num_experts + 1);
  tokens = arena->Take<int32_t>(num_pairs);
  weights = arena->Take<float>(num_pairs);
  token_pairs = arena->Take<int32_t>(num_pairs);
}

int64_t RouterBytes(const RouterInput& p) {
  Arena sizes(nullptr);
  RouterBuffers(p, &sizes);
  return sizes.size();
}

void ChooseExperts(const RouterInput& p, int32_t* expert_ids, float* weights, char* memory) {
  Arena arena(memory);
  const RouterBuffers b(p, &arena);
  if (p.dtype == DType::kFloat32) {
    ComputeLogits<float>(p, b);
  } else {
    ComputeLogits<bf16>(p, b);
  }
  ParallelFor(p.num_tokens, [&](int64_t token) {
    const int64_t first = token * p.router.top_k;
    RouteToken(p, b, token, expert_ids + first, weights + first);
  });
}

void RouteTokens(const RouterInput& p, const MoePairs& pairs, char* memory) {
  Arena arena(memory);
  const RouterBuffers b(p, &arena);
  ChooseExperts(p, b.expert_ids, b.weights, memory);
  NumberPairs(p, b, pairs);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
