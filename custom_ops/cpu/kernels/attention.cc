#include "fdsd/attention.h"

#include "attention_dot.h"
#include "attention_plan.h"
#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Partial result of one query vector over some keys: sums[head_dim] = sum of e^(score - max) * value, then
// weights[16] whose total is the sum of e^(score - max), then max. In float32, one after another in memory.
struct Partial {
  float* sums;
  float* weights;
  float* max;
};
constexpr int64_t PartialSize(int head_dim) { return head_dim + 2 * kLanes; }
FDSD_INLINE Partial PartialAt(float* base, int64_t index, int head_dim) {
  float* start = base + index * PartialSize(head_dim);
  return {start, start + head_dim, start + head_dim + kLanes};
}

void Clear(const Partial& partial, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) Store(Set1(0.0f), partial.sums + d);
  Store(Set1(0.0f), partial.weights);
  *partial.max = kMinusInfinity;
}

void Scale(F32x16 factor, const Partial& partial, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) Store(Mul(Load(partial.sums + d), factor), partial.sums + d);
  Store(Mul(Load(partial.weights), factor), partial.weights);
}

// total = total and then `next`, by log-sum-exp.
void Merge(const Partial& next, int head_dim, const Partial& total) {
  const float max = std::max(*total.max, *next.max);
  const F32x16 scale = Exp(Set1(*total.max - max));
  const F32x16 next_scale = Exp(Set1(*next.max - max));
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(Fma(Load(next.sums + d), next_scale, Mul(Load(total.sums + d), scale)), total.sums + d);
  }
  Store(Fma(Load(next.weights), next_scale, Mul(Load(total.weights), scale)), total.weights);
  *total.max = max;
}

// One step of the running softmax: turn a query vector's scores of 64 keys, of which it sees [first, last), into
// weights relative to the largest score so far, and bring `partial` to the same base.
FDSD_INLINE void Reweigh(int first, int last, int head_dim, float* scores, const Partial& partial) {
  // What lies before holds nothing, what lies behind belongs to later positions or to nobody: both may be anything.
  for (int key = 0; key < first; ++key) scores[key] = kMinusInfinity;
  for (int key = last; key < kBlockKeys; ++key) scores[key] = kMinusInfinity;
  F32x16 x[kBlockPanels];
  for (int i = 0; i < kBlockPanels; ++i) x[i] = Load(scores + i * kPanelKeys);
  const float block_max = ReduceMax(Max(Max(x[0], x[1]), Max(x[2], x[3])));
  const float old_max = *partial.max;
  if (block_max > old_max) {
    Scale(Exp(Set1(old_max - block_max)), partial, head_dim);
    *partial.max = block_max;
  }
  const F32x16 max = Set1(*partial.max);
  for (int i = 0; i < kBlockPanels; ++i) {
    x[i] = Exp(Sub(x[i], max));
    Store(x[i], scores + i * kPanelKeys);
  }
  Store(Add(Load(partial.weights), Add(Add(x[0], x[1]), Add(x[2], x[3]))), partial.weights);
}

// One KV head's share of a tile. Query vector i is head i % group of row i / group; vectors are in order of position.
template <typename T>
class HeadTile {
 public:
  HeadTile(const CascadeAppendAttentionParams& p, const AttentionTile& tile, int32_t kv_head)
      : p_(p),
        tile_(tile),
        kv_head_(kv_head),
        group_(p.num_heads / p.cache.num_kv_heads),
        num_vectors_(tile.num_rows * group_),
        head_dim_(p.cache.head_dim),
        table_(p.block_tables + static_cast<int64_t>(tile.request) * p.max_blocks) {
    for (int i = 0; i < num_vectors_; ++i) q_[i] = static_cast<const T*>(p.q) + Offset(i);
  }

  int num_vectors() const { return num_vectors_; }

  // Vectors before this one see no key of the partition.
  int FirstVector(int32_t partition) const { return FirstVectorAt(partition * kPartitionKeys); }

  // partials[i] = query vector i over the keys of one partition. `scores`: kMaxTileVectors * kBlockKeys floats.
  void RunPartition(int32_t partition, float* scores, float* partials) const {
    for (int i = FirstVector(partition); i < num_vectors_; ++i) Clear(PartialAt(partials, i, head_dim_), head_dim_);
    const int32_t begin = partition * kPartitionKeys;
    const int32_t end = std::min(begin + kPartitionKeys, NumKeys(num_vectors_ - 1));
    for (int32_t key = begin; key < end; key += kBlockKeys) RunBlock(key, scores, partials);
  }

  // y of query vector i from its merged result.
  void Finish(int i, const Partial& total) const {
    T* y = static_cast<T*>(p_.y) + Offset(i);
    const F32x16 weight = Set1(ReduceAdd(Load(total.weights)));
    for (int d = 0; d < head_dim_; d += kLanes) Store(Div(Load(total.sums + d), weight), y + d);
  }

 private:
  // First element of query vector i in q and y.
  int64_t Offset(int i) const {
    const int64_t row = tile_.first_row + i / group_;
    return (row * p_.num_heads + kv_head_ * group_ + i % group_) * head_dim_;
  }

  int32_t NumKeys(int i) const { return tile_.first_position + i / group_ + 1; }

  // The first of the 64 keys from position `key` on that query vector i sees: its own one is never hidden from it.
  int FirstSeen(int i, int32_t key) const { return std::max(0, std::min(p_.first_key, NumKeys(i) - 1) - key); }

  int FirstVectorAt(int32_t key) const { return std::max(0, key - tile_.first_position) * group_; }

  // Addresses of 64 keys from position `key` on. Panels that no vector of the tile sees repeat the first one.
  void Locate(int32_t key, const T** k, const T** v) const {
    const int32_t last = NumKeys(num_vectors_ - 1) - 1;
    for (int i = 0; i < kBlockPanels; ++i) {
      const int32_t position = key + i * kPanelKeys <= last ? key + i * kPanelKeys : key;
      const int32_t id = table_[position / p_.cache.block_size];
      k[i] = KeyAddress<T>(p_.cache, id, kv_head_, position % p_.cache.block_size);
      v[i] = ValueAddress<T>(p_.cache, id, kv_head_, position % p_.cache.block_size);
    }
  }

  KvBlock<T> BlockAt(int32_t key) const {
    KvBlock<T> block{};
    block.k_stride = static_cast<int64_t>(p_.cache.block_size) * kPairSize<T>;
    block.head_dim = head_dim_;
    Locate(key, block.k, block.v);
    const int32_t next = key + kBlockKeys < NumKeys(num_vectors_ - 1) ? key + kBlockKeys : key;
    Locate(next, block.next_k, block.next_v);
    return block;
  }

  void RunBlock(int32_t key, float* scores, float* partials) const {
    const KvBlock<T> block = BlockAt(key);
    const int first = FirstVectorAt(key);
    for (int i = first; i < num_vectors_; i += kTileVectors) {
      const int count = std::min(kTileVectors, num_vectors_ - i);
      Scores<T>(count, q_ + i, block, p_.scale, scores + i * kBlockKeys);
    }
    for (int i = first; i < num_vectors_; ++i) {
      const int last = std::min(kBlockKeys, NumKeys(i) - key);
      Reweigh(FirstSeen(i, key), last, head_dim_, scores + i * kBlockKeys, PartialAt(partials, i, head_dim_));
    }
    for (int i = first; i < num_vectors_; i += kTileVectors) {
      AddBlockValues(i, std::min(kTileVectors, num_vectors_ - i), key, block, scores, partials);
    }
  }

  // Values of keys that a vector does not see are left out, not multiplied by 0: they need not be finite.
  void AddBlockValues(int first, int count, int32_t key, const KvBlock<T>& block, const float* weights,
                      float* partials) const {
    const int64_t stride = PartialSize(head_dim_);
    // Vectors on both sides of first_key have no key in common.
    const bool is_aligned = FirstSeen(first, key) == FirstSeen(first + count - 1, key);
    const int common = is_aligned ? std::min(kBlockKeys, NumKeys(first) - key) : 0;
    if (is_aligned) {
      AddValues<T>(count, weights + first * kBlockKeys, block, FirstSeen(first, key), common, stride,
                   partials + first * stride);
    }
    for (int i = first; i < first + count; ++i) {
      const int begin = std::max(common, FirstSeen(i, key));
      const int end = std::min(kBlockKeys, NumKeys(i) - key);
      if (end > begin) AddValues<T>(1, weights + i * kBlockKeys, block, begin, end, stride, partials + i * stride);
    }
  }

  const CascadeAppendAttentionParams& p_;
  const AttentionTile& tile_;
  const int32_t kv_head_;
  const int group_;
  const int num_vectors_;
  const int head_dim_;
  const int32_t* table_;
  const T* q_[kMaxTileVectors];
};

// All partitions of a tile, merged as they come.
template <typename T>
void RunWhole(const HeadTile<T>& tile, int num_partitions, int head_dim) {
  const int64_t partials_size = kMaxTileVectors * PartialSize(head_dim);
  float* scores = ScratchArray<float>(Scratch::kTask, kMaxTileVectors * kBlockKeys + 2 * partials_size);
  float* totals = scores + kMaxTileVectors * kBlockKeys;
  float* partials = totals + partials_size;
  tile.RunPartition(0, scores, totals);
  for (int part = 1; part < num_partitions; ++part) {
    tile.RunPartition(part, scores, partials);
    for (int i = tile.FirstVector(part); i < tile.num_vectors(); ++i) {
      Merge(PartialAt(partials, i, head_dim), head_dim, PartialAt(totals, i, head_dim));
    }
  }
  for (int i = 0; i < tile.num_vectors(); ++i) tile.Finish(i, PartialAt(totals, i, head_dim));
}

// Where a split tile keeps the partial results of one KV head and partition.
float* KeptPartials(const CascadeAppendAttentionParams& p, const AttentionTile& tile, int32_t kv_head,
                    int32_t partition, float* kept) {
  const int64_t num_vectors = static_cast<int64_t>(tile.num_rows) * (p.num_heads / p.cache.num_kv_heads);
  const int64_t index = (static_cast<int64_t>(kv_head) * tile.num_partitions + partition) * num_vectors;
  return kept + (tile.first_partial + index) * PartialSize(p.cache.head_dim);
}

template <typename T>
void RunTask(const CascadeAppendAttentionParams& p, const AttentionTask& task, float* kept) {
  const HeadTile<T> head_tile(p, *task.tile, task.kv_head);
  if (task.partition < 0) {
    RunWhole(head_tile, task.tile->num_partitions, p.cache.head_dim);
  } else {
    float* scores = ScratchArray<float>(Scratch::kTask, kMaxTileVectors * kBlockKeys);
    head_tile.RunPartition(task.partition, scores, KeptPartials(p, *task.tile, task.kv_head, task.partition, kept));
  }
}

// The same steps as RunWhole, after the fact.
template <typename T>
void MergeSplitTile(const CascadeAppendAttentionParams& p, const AttentionTile& tile, int32_t kv_head, float* kept) {
  const HeadTile<T> head_tile(p, tile, kv_head);
  const int head_dim = p.cache.head_dim;
  float* totals = KeptPartials(p, tile, kv_head, 0, kept);
  for (int part = 1; part < tile.num_partitions; ++part) {
    float* partials = KeptPartials(p, tile, kv_head, part, kept);
    for (int i = head_tile.FirstVector(part); i < head_tile.num_vectors(); ++i) {
      Merge(PartialAt(partials, i, head_dim), head_dim, PartialAt(totals, i, head_dim));
    }
  }
  for (int i = 0; i < head_tile.num_vectors(); ++i) head_tile.Finish(i, PartialAt(totals, i, head_dim));
}

template <typename T>
void Run(const CascadeAppendAttentionParams& p) {
  const AttentionPlan plan = PlanAttention(p);
  float* kept = ScratchArray<float>(Scratch::kRows, plan.num_partials * PartialSize(p.cache.head_dim));
  ParallelFor(plan.num_tasks, [&](int64_t i) { RunTask<T>(p, TaskAt(plan, i), kept); });
  if (plan.num_partials == 0) return;
  ParallelFor(static_cast<int64_t>(plan.num_tiles) * plan.num_kv_heads, [&](int64_t i) {
    const AttentionTile& tile = plan.tiles[i / plan.num_kv_heads];
    if (tile.first_partial >= 0) MergeSplitTile<T>(p, tile, static_cast<int32_t>(i % plan.num_kv_heads), kept);
  });
}

}  // namespace

Error CascadeAppendAttention(const CascadeAppendAttentionParams& p) {
  if (const Error error = CheckAttention(p); error != nullptr) return error;
  if (p.cache.dtype == DType::kFloat32) {
    Run<float>(p);
  } else {
    Run<bf16>(p);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
