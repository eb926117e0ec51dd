#pragma once
// What the ops over rows of logits share: the maxima of a row, taken in one pass. A row is cut into chunks and groups
// at fixed places, and their numbers are merged in order. So what is found in a row depends neither on its neighbours
// nor on the threads. The order of tokens is everywhere: higher logit first, then lower id.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fdsd/runtime.h"
#include "simd_select.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kGroupTokens = 128;                // one maximum is kept per group
constexpr int kChunkTokens = 64 * kGroupTokens;  // one task
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

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
  int32_t argmax;    // lowest id
  int32_t is_valid;  // no NaN and no +inf
  int32_t count;     // for the op to use
  double weight;     // for the op to use
};

// Maximum of n logits. `probe` becomes NaN at the first NaN or +inf: x * 0 is NaN for both, and -inf, a forbidden
// token, is raised before.
FDSD_INLINE float ScanGroup(const float* logits, int n, F32x16* probe) {
  const F32x16 lowest = Set1(kLowest);
  const F32x16 zero = Set1(0.0f);
  F32x16 max = Set1(-kInf);
  F32x16 found = zero;  // apart from `probe`, so that groups do not wait for one another
  for (int i = 0; i < n; i += kLanes) {
    const F32x16 x = LoadLogits(logits + i, n - i);
    max = Max(x, max);
    found = Fma(Max(lowest, x), zero, found);
  }
  *probe = Add(found, *probe);
  return MaxLane(max);
}

// Maximum of every group in a chunk, and of the chunk.
inline Chunk ScanChunk(const float* logits, int begin, int end, float* group_max) {
  Chunk best{-kInf, begin, 1, 0, 0.0};
  F32x16 probe = Set1(0.0f);
  int best_group = begin;
  for (int group = begin; group < end; group += kGroupTokens) {
    const float* from = logits + group;
    const int n = end - group;
    // A whole group has a loop of constant length.
    const float value = n >= kGroupTokens ? ScanGroup(from, kGroupTokens, &probe) : ScanGroup(from, n, &probe);
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

// The chunks of a row taken together, in order.
inline Chunk WholeOf(const Chunk* chunks, int num_chunks) {
  Chunk whole = chunks[0];
  for (int c = 1; c < num_chunks; ++c) {
    const Chunk& chunk = chunks[c];
    whole.is_valid &= chunk.is_valid;
    whole.count += chunk.count;
    whole.weight += chunk.weight;
    if (chunk.max > whole.max) {
      whole.max = chunk.max;
      whole.argmax = chunk.argmax;
    }
  }
  return whole;
}

// The maxima of many rows at once. Lives in Scratch::kOp until the op ends.
class LogitsScan {
 public:
  LogitsScan(const float* logits, int num_rows, int vocab_size) : num_chunks_(CeilDiv(vocab_size, kChunkTokens)) {
    const int64_t num_tasks = static_cast<int64_t>(num_rows) * num_chunks_;
    chunks_ = ScratchArray<Chunk>(Scratch::kOp, num_tasks);
    ParallelFor(num_tasks, [&](int64_t task) {
      float group_max[kChunkTokens / kGroupTokens];
      const int begin = static_cast<int>(task % num_chunks_) * kChunkTokens;
      const int end = std::min(begin + kChunkTokens, vocab_size);
      chunks_[task] = ScanChunk(logits + task / num_chunks_ * vocab_size, begin, end, group_max);
    });
  }

  Chunk Whole(int64_t row) const { return WholeOf(chunks_ + row * num_chunks_, num_chunks_); }

 private:
  int num_chunks_;
  Chunk* chunks_;
};

// One row, scanned, with room for what is found out about it. Lives in Scratch::kTask of the calling thread until that
// thread makes another. Where no task runs around it, its passes use all threads.
class LogitsRow {
 public:
  LogitsRow(const float* logits, int vocab_size)
      : logits_(logits),
        vocab_size_(vocab_size),
        num_groups_(CeilDiv(vocab_size, kGroupTokens)),
        num_chunks_(CeilDiv(vocab_size, kChunkTokens)) {
    const int64_t num_floats = num_groups_ + static_cast<int64_t>(num_chunks_) * kChunkRoom;
    void* scratch = ScratchBytes(Scratch::kTask, num_chunks_ * static_cast<int64_t>(sizeof(Chunk)) + num_floats * 4);
    chunks_ = static_cast<Chunk*>(scratch);
    group_max_ = reinterpret_cast<float*>(chunks_ + num_chunks_);
    values_ = group_max_ + num_groups_;
    ForChunks([this](int begin, int end, Chunk* chunk) {
      *chunk = ScanChunk(logits_, begin, end, group_max_ + begin / kGroupTokens);
    });
    const Chunk whole = Whole();
    max_ = whole.max;
    argmax_ = whole.is_valid && whole.max > -kInf ? whole.argmax : -1;
  }

  const float* logits() const { return logits_; }
  int vocab_size() const { return vocab_size_; }
  int num_groups() const { return num_groups_; }
  int num_chunks() const { return num_chunks_; }
  const float* group_max() const { return group_max_; }
  const Chunk& chunk(int c) const { return chunks_[c]; }
  float max() const { return max_; }
  // First token in the order; -1 for a row with NaN or +inf, or without any finite logit.
  int32_t argmax() const { return argmax_; }
  Chunk Whole() const { return WholeOf(chunks_, num_chunks_); }

  // Room for the logits of chunk c; the chunks' rooms follow one another.
  float* values(int c) const { return values_ + static_cast<int64_t>(c) * kChunkRoom; }

  // body(begin, end, chunk) for the tokens of every chunk.
  template <typename Body>
  void ForChunks(Body&& body) const {
    ParallelFor(num_chunks_, [&](int64_t c) {
      const int begin = static_cast<int>(c) * kChunkTokens;
      body(begin, std::min(begin + kChunkTokens, vocab_size_), chunks_ + c);
    });
  }

 private:
  static constexpr int kChunkRoom = kChunkTokens + kLanes;  // StoreLanes writes past the last one

  const float* logits_;
  int vocab_size_;
  int num_groups_;
  int num_chunks_;
  Chunk* chunks_;
  float* group_max_;
  float* values_;
  float max_;
  int32_t argmax_;
};

// body(i) for independent pieces of work on rows: side by side where there are enough to keep the threads evenly busy,
// else one after the other with all threads on each.
template <typename Body>
void ForEach(int64_t count, Body&& body) {
  constexpr int64_t kPerThread = 4;
  // With many threads a row has too few chunks to keep them busy: about as many as this for 152k tokens.
  constexpr int64_t kEnough = 16;
  if (count >= std::min(static_cast<int64_t>(kPerThread) * NumThreads(), kEnough)) return ParallelFor(count, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace FDSD_ISA
}  // namespace fdsd
