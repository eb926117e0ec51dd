#pragma once
// Neighbouring KV heads' share of a tile: query vectors that read the same keys, one partition at a time.
//
// A block of the cache holds the keys of all heads one behind the other, and so its values. All heads of a run take
// their scores of 64 keys before the next 64 are read, and likewise the values: memory is read in long stretches, which
// the processor's prefetcher needs to be of use.
#include "attention_plan.h"
#include "attention_softmax.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kPartitionBlocks = kPartitionKeys / kBlockKeys;

// What a run leaves to itself between its three passes over a partition.
template <typename T>
struct RunScratch {
  alignas(64) float scores[kMaxRunVectors * kPartitionKeys];
  alignas(64) typename KvDot<T>::Weight weights[kMaxRunVectors * kPartitionKeys];
  alignas(64) float factors[kPartitionBlocks * kMaxRunVectors];
};

// Partial results of a run: that of vector i of its head h is at h * head_stride + i, in units of one.
struct RunPartials {
  float* base;
  int64_t head_stride;
};

// Vector i of a head is query head i % group of row i / group; vectors are in order of position. Q is the type of q and
// y, T that of the cache.
template <typename Q, typename T>
class TileRun {
 public:
  using Query = QueryVector<typename KvDot<T>::Query>;

  //   prepared   [T * Hq], all query vectors of the call, if they are converted
  TileRun(const CascadeAppendAttentionParams& p, const AttentionRun& run, const Query* prepared)
      : p_(p),
        tile_(*run.tile),
        first_head_(run.first_head),
        num_heads_(run.num_heads),
        group_(p.num_heads / p.cache.num_kv_heads),
        num_vectors_(run.tile->num_rows * group_),
        head_dim_(p.cache.head_dim),
        table_(BlocksOf(p, run.tile->request)) {
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = 0; i < num_vectors_; ++i) q_[h * num_vectors_ + i] = QueryAt(Index(h, i), prepared);
    }
  }

  int num_heads() const { return num_heads_; }
  int num_vectors() const { return num_vectors_; }

  // Vectors of a head before this one see no key of the partition.
  int FirstVector(int32_t partition) const { return FirstVectorAt(partition * kPartitionKeys); }

  // partials = the run's vectors over the keys of one partition.
  void RunPartition(int32_t partition, RunScratch<T>* scratch, const RunPartials& partials) const {
    const int32_t begin = partition * kPartitionKeys;
    const int32_t end = std::min(begin + kPartitionKeys, NumKeys(num_vectors_ - 1));
    const int num_blocks = (end - begin + kBlockKeys - 1) / kBlockKeys;
    KvBlock<T> blocks[kPartitionBlocks];  // of the first head
    for (int b = 0; b < num_blocks; ++b) blocks[b] = Locate(begin + b * kBlockKeys);
    // Head h of block b, or what comes behind its last head.
    const auto block_at = [&](int b, int h) {
      if (h == num_heads_) return blocks[std::min(b + 1, num_blocks - 1)];
      return At(blocks[b], h);
    };
    for (int b = 0; b < num_blocks; ++b) {
      for (int h = 0; h < num_heads_; ++h) {
        const KvBlock<T> next = block_at(b, h + 1);
        ScoreBlock(h, begin + b * kBlockKeys, block_at(b, h), next.k, scratch->scores + b * kBlockKeys);
      }
    }
    for (int h = 0; h < num_heads_; ++h) {
      const float* v_scale[kPartitionBlocks][kBlockPanels];
      for (int b = 0; b < num_blocks; ++b) ScalesAt(blocks[b], h, v_scale[b]);
      for (int i = FirstVectorAt(begin); i < num_vectors_; ++i) {
        WeighVector(h, i, Seen(i, begin, kPartitionKeys), v_scale, scratch, At(partials, h, i));
      }
    }
    for (int b = 0; b < num_blocks; ++b) {
      for (int h = 0; h < num_heads_; ++h) {
        const KvBlock<T> next = block_at(b, h + 1);
        AddBlock(h, begin + b * kBlockKeys, block_at(b, h), next.v, *scratch, partials);
      }
    }
  }

  // partials = partials and then `next`, for the vectors of all heads from vector `first` on.
  void MergePartials(int first, const RunPartials& next, const RunPartials& partials) const {
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = first; i < num_vectors_; ++i) Merge(At(next, h, i), head_dim_, At(partials, h, i));
    }
  }

  // y of the run's vectors from their merged results.
  void Finish(const RunPartials& totals) const {
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = 0; i < num_vectors_; ++i) {
        const Partial total = At(totals, h, i);
        Q* y = static_cast<Q*>(p_.y) + Index(h, i) * head_dim_;
        const F32x16 weight = Set1(*total.weight);
        for (int d = 0; d < head_dim_; d += kLanes) Store(Div(Load(total.sums + d), weight), y + d);
      }
    }
  }

 private:
  using Kv = KvDot<T>;

  // Which of the query vectors in q and y vector i of head h is.
  int64_t Index(int h, int i) const {
    const int64_t row = tile_.rows == nullptr ? tile_.first_row + i / group_ : tile_.rows[i / group_];
    return row * p_.num_heads + (first_head_ + h) * group_ + i % group_;
  }

  Query QueryAt(int64_t index, const Query* prepared) const {
    if constexpr (Kv::kPreparesQuery) {
      return prepared[index];
    } else {
      return {static_cast<const Q*>(p_.q) + index * head_dim_, p_.scale * kLog2E, 0};
    }
  }

  Partial At(const RunPartials& partials, int h, int i) const {
    return PartialAt(partials.base, h * partials.head_stride + i, head_dim_);
  }

  float* ScoresAt(RunScratch<T>* scratch, int h, int i) const {
    return scratch->scores + (h * num_vectors_ + i) * kPartitionKeys;
  }
  template <typename Scratch>
  auto* WeightsAt(Scratch* scratch, int h, int i) const {
    return scratch->weights + (h * num_vectors_ + i) * kPartitionKeys;
  }
  // Of head h's vectors, for the block that is `offset` keys into the partition.
  template <typename Scratch>
  auto* FactorsAt(Scratch* scratch, int h, int offset) const {
    return scratch->factors + offset / kBlockKeys * kMaxRunVectors + h * num_vectors_;
  }

  // Rows of several requests see every key of their tile.
  int32_t NumKeys(int i) const { return tile_.num_keys + (tile_.rows == nullptr ? i / group_ : 0); }

  // Which of the keys from position `key` on vector i sees: its own one is never hidden from it.
  KeyRange Seen(int i, int32_t key, int num_keys) const {
    return {std::max(0, std::min(p_.first_key, NumKeys(i) - 1) - key), std::min(num_keys, NumKeys(i) - key)};
  }

  int FirstVectorAt(int32_t key) const {
    return tile_.rows == nullptr ? std::max(0, key + 1 - tile_.num_keys) * group_ : 0;
  }

  // The keys and values of the run's first head from position `key` on. Panels behind the last key of the tile may have
  // no block: they repeat the first one.
  KvBlock<T> Locate(int32_t key) const {
    KvBlock<T> block{};
    block.k_stride = static_cast<int64_t>(p_.cache.block_size) * kPackSize<T>;
    block.head_dim = head_dim_;
    const int32_t last = NumKeys(num_vectors_ - 1) - 1;
    for (int i = 0; i < kBlockPanels; ++i) {
      const int32_t position = key + i * kPanelKeys <= last ? key + i * kPanelKeys : key;
      const int32_t id = table_[position / p_.cache.block_size];
      const int32_t offset = position % p_.cache.block_size;
      block.k[i] = KeyAddress<T>(p_.cache, id, first_head_, offset);
      block.v[i] = ValueAddress<T>(p_.cache, id, first_head_, offset);
      if (p_.cache.k_scale == nullptr) continue;
      const int64_t scale = ScaleIndex(p_.cache, id, first_head_, offset);
      block.k_scale[i] = p_.cache.k_scale + scale;
      block.v_scale[i] = p_.cache.v_scale + scale;
    }
    return block;
  }

  // The same keys and values of the run's head h.
  KvBlock<T> At(KvBlock<T> block, int h) const {
    const int64_t keys = static_cast<int64_t>(h) * p_.cache.block_size;
    for (int i = 0; i < kBlockPanels; ++i) {
      block.k[i] += keys * head_dim_;
      block.v[i] += keys * head_dim_;
      if (p_.cache.k_scale == nullptr) continue;
      block.k_scale[i] += keys;
      block.v_scale[i] += keys;
    }
    return block;
  }

  // The register tiles each ask for their share of what is read next, so that memory is busy all the time. Where a few
  // vectors leave it nothing to wait for, the processor's prefetcher does better alone.
  void SetNext(const T* const* next, const T* const* current, int tile, int num_tiles, KvBlock<T>* block) const {
    for (int i = 0; i < kBlockPanels; ++i) {
      block->next[i] = num_vectors_ <= kStreamVectors ? nullptr : i % num_tiles == tile ? next[i] : current[i];
    }
  }

  // Scores of head h with the keys from `key` on, to scores[(h * num_vectors + i) * kPartitionKeys..].
  void ScoreBlock(int h, int32_t key, KvBlock<T> block, const T* const* next, float* scores) const {
    const int first = FirstVectorAt(key);
    const int num_tiles = (num_vectors_ - first + kScoreVectors - 1) / kScoreVectors;
    for (int i = first, tile = 0; i < num_vectors_; i += kScoreVectors, ++tile) {
      const int vector = h * num_vectors_ + i;
      SetNext(next, block.k, tile, num_tiles, &block);
      Scores<T>(std::min(kScoreVectors, num_vectors_ - i), q_ + vector, block, scores + vector * kPartitionKeys);
    }
  }

  void ScalesAt(const KvBlock<T>& block, int h, const float** v_scale) const {
    for (int i = 0; i < kBlockPanels; ++i) {
      v_scale[i] = block.v_scale[i] == nullptr ? nullptr : block.v_scale[i] + h * int64_t{p_.cache.block_size};
    }
  }

  // Turn scores of a partition's keys into weights, and begin a partial result with them.
  void WeighVector(int h, int i, KeyRange seen, const float* const (*v_scale)[kBlockPanels], RunScratch<T>* scratch,
                   const Partial& partial) const {
    float* scores = ScoresAt(scratch, h, i);
    const float max = LargestScore(seen, scores);
    F32x16 total = Set1(0.0f);
    for (int offset = 0; offset < seen.end; offset += kBlockKeys) {
      total = Add(total, Weigh<T>(max, v_scale[offset / kBlockKeys], scores + offset, WeightsAt(scratch, h, i) + offset,
                                  FactorsAt(scratch, h, offset) + i));
    }
    for (int d = 0; d < head_dim_; d += kLanes) Store(Set1(0.0f), partial.sums + d);
    *partial.weight = ReduceAdd(total);
    *partial.max = max;
  }

  // Add the values of the keys from `key` on to head h's partial results.
  void AddBlock(int h, int32_t key, KvBlock<T> block, const T* const* next, const RunScratch<T>& scratch,
                const RunPartials& partials) const {
    const int offset = key % kPartitionKeys;
    const int first = FirstVectorAt(key);
    const int num_tiles = (num_vectors_ - first + kValueVectors - 1) / kValueVectors;
    for (int i = first, tile = 0; i < num_vectors_; i += kValueVectors, ++tile) {
      SetNext(next, block.v, tile, num_tiles, &block);
      const WeightedRows<T> rows{WeightsAt(&scratch, h, i) + offset, FactorsAt(&scratch, h, offset) + i,
                                 At(partials, h, i).sums, PartialSize(head_dim_)};
      AddBlockValues(i, std::min(kValueVectors, num_vectors_ - i), key, block, rows);
    }
  }

  void AddBlockValues(int first, int count, int32_t key, const KvBlock<T>& block, const WeightedRows<T>& rows) const {
    if constexpr (!Kv::kSkipsHidden) {
      AddValues<T>(count, rows, block, {0, kBlockKeys});
      return;
    }
    // Vectors on both sides of first_key have no key in common.
    const KeyRange seen = Seen(first, key, kBlockKeys);
    const bool is_aligned = seen.begin == Seen(first + count - 1, key, kBlockKeys).begin;
    const int common = is_aligned ? seen.end / kPackSize<T> * kPackSize<T> : 0;
    if (common > seen.begin) AddValues<T>(count, rows, block, {seen.begin, common});
    for (int i = 0; i < count; ++i) {
      const KeyRange own = Seen(first + i, key, kBlockKeys);
      const int begin = std::max(common, own.begin);
      const WeightedRows<T> row{rows.weights + i * kPartitionKeys, rows.factors + i, rows.sums + i * rows.sums_stride,
                                rows.sums_stride};
      if (own.end > begin) AddValues<T>(1, row, block, {begin, own.end});
    }
  }

  const CascadeAppendAttentionParams& p_;
  const AttentionTile& tile_;
  const int32_t first_head_;
  const int num_heads_;
  const int group_;
  const int num_vectors_;  // of a head
  const int head_dim_;
  const int32_t* table_;
  Query q_[kMaxRunVectors];
};

}  // namespace FDSD_ISA
}  // namespace fdsd
