#pragma once
// What the ops over rows of logits share: one pass for maxima, weights relative to the maximum, and the most likely
// tokens. A row is cut into chunks and groups at fixed places, so its numbers do not depend on its neighbours or on the
// threads. The order of tokens is everywhere: higher logit first, then lower id.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kGroupTokens = 128;                // one maximum is kept per group
constexpr int kChunkTokens = 64 * kGroupTokens;  // one task
constexpr float kInf = std::numeric_limits<float>::infinity();

FDSD_INLINE int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Sixteen logits from p, of which n exist; the others are -inf, which no maximum and no weight notices.
FDSD_INLINE F32x16 LoadLogits(const float* p, int n) {
  if (n >= kLanes) return Load(p);
  alignas(64) float buffer[kLanes];
  for (int i = 0; i < kLanes; ++i) buffer[i] = i < n ? p[i] : -kInf;
  return Load(buffer);
}

struct Chunk {
  float max;
  int32_t argmax;      // lowest id
  int32_t is_valid;    // no NaN and no +inf
  int32_t num_before;  // for the op to use
  double weight;       // for the op to use
};

// Maximum of every group in a chunk, and of the chunk.
inline Chunk ScanChunk(const float* logits, int begin, int end, float* group_max) {
  Chunk best{-kInf, begin, 1, 0, 0.0};
  // Becomes NaN at the first NaN or +inf: x * 0 is NaN for both, and -inf, a forbidden token, is raised before.
  F32x16 probe = Set1(0.0f);
  const F32x16 lowest = Set1(std::numeric_limits<float>::lowest());
  int best_group = begin;
  for (int group = begin; group < end; group += kGroupTokens) {
    const int group_end = std::min(group + kGroupTokens, end);
    F32x16 max = Set1(-kInf);
    for (int i = group; i < group_end; i += kLanes) {
      const F32x16 x = LoadLogits(logits + i, group_end - i);
      max = Max(x, max);
      probe = Fma(Max(lowest, x), Set1(0.0f), probe);
    }
    const float value = ReduceMax(max);
    group_max[(group - begin) / kGroupTokens] = value;
    if (value > best.max) {
      best.max = value;
      best_group = group;
    }
  }
  best.is_valid = ReduceAdd(probe) == 0.0f;
  best.argmax = best_group;
  while (best.is_valid && logits[best.argmax] != best.max) ++best.argmax;
  return best;
}

// The maxima of many rows, and room for what an op sums up per chunk. Lives in Scratch::kOp until the op ends.
class LogitsScan {
 public:
  // Rows of logits, those that are replaced excepted: row i is row replacing_row[i] of `replacing` unless that is -1.
  LogitsScan(const float* logits, int num_rows, int vocab_size, const float* replacing = nullptr,
             const int32_t* replacing_row = nullptr)
      : logits_(logits),
        replacing_(replacing),
        replacing_row_(replacing_row),
        num_rows_(num_rows),
        vocab_size_(vocab_size),
        num_groups_(CeilDiv(vocab_size, kGroupTokens)),
        num_chunks_(CeilDiv(vocab_size, kChunkTokens)) {
    const int64_t num_chunks = static_cast<int64_t>(num_rows) * num_chunks_;
    const int64_t num_groups = static_cast<int64_t>(num_rows) * num_groups_;
    const int64_t num_bytes = num_chunks * static_cast<int64_t>(sizeof(Chunk)) + num_groups * 4;
    chunks_ = static_cast<Chunk*>(ScratchBytes(Scratch::kOp, num_bytes));
    group_max_ = reinterpret_cast<float*>(chunks_ + num_chunks);
    ForChunks([this](int64_t row, int begin, int end, Chunk* chunk) {
      *chunk = ScanChunk(this->row(row), begin, end, group_max_ + row * num_groups_ + begin / kGroupTokens);
    });
  }

  int vocab_size() const { return vocab_size_; }
  int num_groups() const { return num_groups_; }
  int num_chunks() const { return num_chunks_; }
  const float* row(int64_t row) const {
    if (replacing_row_ == nullptr || replacing_row_[row] < 0) return logits_ + row * vocab_size_;
    return replacing_ + static_cast<int64_t>(replacing_row_[row]) * vocab_size_;
  }
  const float* group_max(int64_t row) const { return group_max_ + row * num_groups_; }
  const Chunk* chunks(int64_t row) const { return chunks_ + row * num_chunks_; }

  // The chunks of a row taken together, in order.
  Chunk Whole(int64_t row) const {
    Chunk whole = chunks(row)[0];
    for (int c = 1; c < num_chunks_; ++c) {
      const Chunk& chunk = chunks(row)[c];
      whole.is_valid &= chunk.is_valid;
      whole.num_before += chunk.num_before;
      whole.weight += chunk.weight;
      if (chunk.max > whole.max) {
        whole.max = chunk.max;
        whole.argmax = chunk.argmax;
      }
    }
    return whole;
  }

  // body(row, begin, end, chunk) for the token range of every chunk of every row, in parallel.
  template <typename Body>
  void ForChunks(Body&& body) const {
    ParallelFor(static_cast<int64_t>(num_rows_) * num_chunks_, [&](int64_t task) {
      const int begin = static_cast<int>(task % num_chunks_) * kChunkTokens;
      body(task / num_chunks_, begin, std::min(begin + kChunkTokens, vocab_size_), chunks_ + task);
    });
  }

 private:
  const float* logits_;
  const float* replacing_;
  const int32_t* replacing_row_;
  int num_rows_;
  int vocab_size_;
  int num_groups_;
  int num_chunks_;
  Chunk* chunks_;
  float* group_max_;
};

// A token's weight is exp((logit - max) / temperature), its probability up to a factor; logits under `floor` weigh 0.
// The maximum is subtracted first, so that no temperature overflows.
struct Weighting {
  float max;
  float temperature;
  float floor;
};

FDSD_INLINE void Weigh(const float* logits, int n, const Weighting& weighting, float* weights) {
  alignas(64) float x[kLanes];
  const F32x16 values = LoadLogits(logits, n);
  Store(values, x);
  Store(Exp(Div(Sub(values, Set1(weighting.max)), Set1(weighting.temperature))), weights);
  for (int i = 0; i < kLanes; ++i) weights[i] = x[i] >= weighting.floor ? weights[i] : 0.0f;
}

inline double SumWeights(const float* logits, int n, const Weighting& weighting) {
  double lanes[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    alignas(64) float weights[kLanes];
    Weigh(logits + i, n - i, weighting, weights);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[lane];
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

struct Candidate {
  float logit;
  int32_t id;
  float weight;
};

struct IsBefore {
  FDSD_INLINE bool operator()(const Candidate& a, const Candidate& b) const {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  }
};

struct IsHigher {
  FDSD_INLINE bool operator()(float a, float b) const { return a > b; }
};

// A logit that at least k tokens of the row reach and, unless logits tie, not many more do: the k-th largest group
// maximum, since k groups hold a token that high. -inf when the row has fewer groups. `scratch` holds num_groups
// floats.
inline float FloorOfTop(const float* group_max, int num_groups, int k, float* scratch) {
  if (k > num_groups) return -kInf;
  std::memcpy(scratch, group_max, static_cast<size_t>(num_groups) * sizeof(float));
  std::nth_element(scratch, scratch + (k - 1), scratch + num_groups, IsHigher());
  return scratch[k - 1];
}

// The tokens of a row with a logit of at least `floor`, by id. Returns how many.
inline int Collect(const LogitsScan& scan, int64_t row, float floor, Candidate* candidates) {
  const float* logits = scan.row(row);
  const float* group_max = scan.group_max(row);
  int count = 0;
  for (int g = 0; g < scan.num_groups(); ++g) {
    if (group_max[g] < floor) continue;
    const int end = std::min((g + 1) * kGroupTokens, scan.vocab_size());
    for (int id = g * kGroupTokens; id < end; ++id) {
      candidates[count] = Candidate{logits[id], id, 0.0f};  // overwritten unless it counts
      count += logits[id] >= floor;
    }
  }
  return count;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
