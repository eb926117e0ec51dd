// Mixture of experts: route every token, then run the experts one after another, each on all of its tokens at once, so
// its weights are read once. A token's sum grows in the order of expert ids, whoever else is in the call.
#include "fdsd/moe.h"

#include "fdsd/activation.h"
#include "linear_layout.h"
#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

Error Linear(const LinearParams& p);
Error Swiglu(const SwigluParams& p);

namespace {

// Experts scored by one task; the logits of a token are padded to a multiple of it.
constexpr int kRouterExperts = kLanes;

FDSD_INLINE int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Consecutive arrays in one piece of scratch memory, each 64-byte aligned. Run once with base = nullptr to learn the
// size.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + size_);
    size_ += DivideUp(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
    return array;
  }
  int64_t size() const { return size_; }

 private:
  char* base_;
  int64_t size_ = 0;
};

// What the op keeps while it runs. A pair is a (token, chosen expert); pairs are numbered by expert, then by token.
struct Buffers {
  float* logits;         // [T, padded E]
  int32_t* expert_ids;   // [T, top_k]
  float* weights;        // [T, top_k]
  int32_t* first_pair;   // [E + 1]
  int32_t* next_pair;    // [E]
  int32_t* pair_tokens;  // [T * top_k]
  float* pair_weights;   // [T * top_k]
  float* sums;           // [T, H]
  // One expert's rows; an expert has at most T.
  char* x;          // [T, H]
  char* gate_up;    // [T, 2 * I]
  char* activated;  // [T, I]
  float* y;         // [T, H]

  Buffers(const MoeFfnParams& p, Arena* arena) {
    const int64_t tokens = p.num_tokens;
    const int64_t element = ElementBytes(p.dtype);
    logits = arena->Take<float>(tokens * PaddedExperts(p));
    expert_ids = arena->Take<int32_t>(tokens * p.top_k);
    weights = arena->Take<float>(tokens * p.top_k);
    first_pair = arena->Take<int32_t>(p.num_experts + 1);
    next_pair = arena->Take<int32_t>(p.num_experts);
    pair_tokens = arena->Take<int32_t>(tokens * p.top_k);
    pair_weights = arena->Take<float>(tokens * p.top_k);
    sums = arena->Take<float>(tokens * p.hidden_size);
    x = arena->Take<char>(tokens * p.hidden_size * element);
    gate_up = arena->Take<char>(tokens * p.intermediate_size * 2 * element);
    activated = arena->Take<char>(tokens * p.intermediate_size * element);
    y = arena->Take<float>(tokens * p.hidden_size);
  }

  static int64_t PaddedExperts(const MoeFfnParams& p) {
    return DivideUp(p.num_experts, kRouterExperts) * kRouterExperts;
  }
};

template <typename T>
float RouterLogit(const T* x, const float* weight, int32_t hidden_size) {
  F32x16 sum = Set1(0.0f);
  int32_t i = 0;
  for (; i + kLanes <= hidden_size; i += kLanes) sum = Fma(Load(x + i), Load(weight + i), sum);
  const int rest = hidden_size - i;
  if (rest > 0) sum = Fma(LoadPartial(x + i, rest), LoadPartial(weight + i, rest), sum);
  return ReduceAdd(sum);
}

template <typename T>
void ComputeLogits(const MoeFfnParams& p, const Buffers& b) {
  const int64_t padded = Buffers::PaddedExperts(p);
  const int64_t parts = padded / kRouterExperts;
  ParallelFor(p.num_tokens * parts, [&](int64_t task) {
    const int64_t token = task / parts;
    const int64_t begin = task % parts * kRouterExperts;
    const T* x = static_cast<const T*>(p.x) + token * p.hidden_size;
    for (int64_t e = begin; e < begin + kRouterExperts; ++e) {
      b.logits[token * padded + e] = e < p.num_experts
                                         ? RouterLogit(x, p.router_weight + e * p.hidden_size, p.hidden_size)
                                         : -std::numeric_limits<float>::infinity();
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

// The best expert not chosen yet, the lowest id among equals. NaN scores lose to every other; one expert is always
// found.
int32_t BestExpert(const MoeFfnParams& p, const float* probs, const int32_t* chosen, int32_t num_chosen) {
  int32_t best = -1;
  float best_score = 0.0f;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    bool is_taken = false;
    for (int32_t i = 0; i < num_chosen; ++i) is_taken |= chosen[i] == e;
    if (is_taken) continue;
    const float score = p.selection_bias == nullptr ? probs[e] : probs[e] + p.selection_bias[e];
    if (best < 0 || score > best_score || (std::isnan(best_score) && !std::isnan(score))) {
      best = e;
      best_score = score;
    }
  }
  return best;
}

void RouteToken(const MoeFfnParams& p, const Buffers& b, int64_t token) {
  const int64_t padded = Buffers::PaddedExperts(p);
  float* probs = b.logits + token * padded;
  Softmax(probs, padded);
  int32_t* ids = b.expert_ids + token * p.top_k;
  float* weights = b.weights + token * p.top_k;
  float sum = 0.0f;
  for (int32_t i = 0; i < p.top_k; ++i) {
    ids[i] = BestExpert(p, probs, ids, i);
    weights[i] = probs[ids[i]];
    sum += weights[i];
  }
  if (p.normalize == 0) return;
  const float divisor = sum > p.norm_min || std::isnan(sum) ? sum : p.norm_min;
  for (int32_t i = 0; i < p.top_k; ++i) weights[i] /= divisor;
}

// Number the pairs by expert.
void GroupPairs(const MoeFfnParams& p, const Buffers& b) {
  const int64_t num_pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  std::memset(b.next_pair, 0, sizeof(int32_t) * static_cast<size_t>(p.num_experts));
  for (int64_t i = 0; i < num_pairs; ++i) ++b.next_pair[b.expert_ids[i]];
  b.first_pair[0] = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) {
    b.first_pair[e + 1] = b.first_pair[e] + b.next_pair[e];
    b.next_pair[e] = b.first_pair[e];
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t pair = b.next_pair[b.expert_ids[i]]++;
    b.pair_tokens[pair] = static_cast<int32_t>(i / p.top_k);
    b.pair_weights[pair] = b.weights[i];
  }
}

// y = down(swiglu(gate_up(x))) of rows b.x; between the steps values are rounded to p.dtype, as in a dense layer.
Error RunExpert(const MoeFfnParams& p, const Buffers& b, int64_t expert, int32_t num_rows) {
  const int64_t gate_up_bytes = PackedLinearBytes(p.hidden_size, 2 * p.intermediate_size, p.format);
  const int64_t down_bytes = PackedLinearBytes(p.intermediate_size, p.hidden_size, p.format);
  const char* gate_up = static_cast<const char*>(p.gate_up) + expert * gate_up_bytes;
  const char* down = static_cast<const char*>(p.down) + expert * down_bytes;
  const LinearParams first{num_rows, p.hidden_size, 2 * p.intermediate_size, p.format, p.dtype, p.dtype, b.x, gate_up,
                           nullptr,  b.gate_up};
  if (const Error error = FDSD_ISA::Linear(first)) return error;
  if (const Error error = FDSD_ISA::Swiglu({num_rows, p.intermediate_size, p.dtype, b.gate_up, b.activated}))
    return error;
  const LinearParams second{num_rows,        p.intermediate_size, p.hidden_size, p.format, p.dtype,
                            DType::kFloat32, b.activated,         down,          nullptr,  b.y};
  return FDSD_ISA::Linear(second);
}

void GatherRows(const MoeFfnParams& p, const Buffers& b, int32_t first_pair, int32_t num_rows) {
  const int64_t row_bytes = p.hidden_size * ElementBytes(p.dtype);
  for (int64_t r = 0; r < num_rows; ++r) {
    const char* from = static_cast<const char*>(p.x) + b.pair_tokens[first_pair + r] * row_bytes;
    std::memcpy(b.x + r * row_bytes, from, static_cast<size_t>(row_bytes));
  }
}

void AddWeighted(const MoeFfnParams& p, const Buffers& b, int32_t first_pair, int32_t num_rows) {
  ParallelFor(num_rows, [&](int64_t r) {
    float* sum = b.sums + static_cast<int64_t>(b.pair_tokens[first_pair + r]) * p.hidden_size;
    const float* y = b.y + r * p.hidden_size;
    const F32x16 weight = Set1(b.pair_weights[first_pair + r]);
    int32_t i = 0;
    for (; i + kLanes <= p.hidden_size; i += kLanes) Store(Fma(weight, Load(y + i), Load(sum + i)), sum + i);
    const int rest = p.hidden_size - i;
    if (rest > 0) StorePartial(Fma(weight, LoadPartial(y + i, rest), LoadPartial(sum + i, rest)), sum + i, rest);
  });
}

template <typename T>
void StoreRows(const MoeFfnParams& p, const Buffers& b) {
  ParallelFor(p.num_tokens, [&](int64_t token) {
    const float* sum = b.sums + token * p.hidden_size;
    const T* shared = p.shared == nullptr ? nullptr : static_cast<const T*>(p.shared) + token * p.hidden_size;
    T* y = static_cast<T*>(p.y) + token * p.hidden_size;
    for (int32_t i = 0; i < p.hidden_size; i += kLanes) {
      const int n = std::min(kLanes, p.hidden_size - i);
      F32x16 v = LoadPartial(sum + i, n);
      if (shared != nullptr) v = Add(v, LoadPartial(shared + i, n));
      StorePartial(v, y + i, n);
    }
  });
}

Error CheckMoe(const MoeFfnParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (p.intermediate_size <= 0) return "intermediate_size: expected a positive number, got 0 or less";
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (p.top_k < 1 || p.top_k > p.num_experts) return "top_k: expected 1..num_experts, got a number outside";
  if (const Error error = CheckLinear(p.hidden_size, p.intermediate_size, p.format, p.gate_up)) return error;
  return CheckLinear(p.intermediate_size, p.hidden_size, p.format, p.down);
}

}  // namespace

Error MoeFfn(const MoeFfnParams& p) {
  if (const Error error = CheckMoe(p)) return error;
  Arena sizes(nullptr);
  Buffers(p, &sizes);
  Arena arena(ScratchArray<char>(Scratch::kOp, sizes.size()));
  const Buffers b(p, &arena);
  if (p.dtype == DType::kFloat32) {
    ComputeLogits<float>(p, b);
  } else {
    ComputeLogits<bf16>(p, b);
  }
  ParallelFor(p.num_tokens, [&](int64_t token) { RouteToken(p, b, token); });
  GroupPairs(p, b);
  std::memset(b.sums, 0, sizeof(float) * static_cast<size_t>(p.num_tokens) * static_cast<size_t>(p.hidden_size));
  for (int32_t e = 0; e < p.num_experts; ++e) {
    const int32_t num_rows = b.first_pair[e + 1] - b.first_pair[e];
    if (num_rows == 0) continue;
    GatherRows(p, b, b.first_pair[e], num_rows);
    if (const Error error = RunExpert(p, b, e, num_rows)) return error;
    AddWeighted(p, b, b.first_pair[e], num_rows);
  }
  if (p.dtype == DType::kFloat32) {
    StoreRows<float>(p, b);
  } else {
    StoreRows<bf16>(p, b);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
