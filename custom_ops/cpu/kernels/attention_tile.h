#pragma once
// Neighbouring KV heads' share of a tile: query vectors that read the same keys, one partition at a time.
//
// A block of the cache holds the keys of all heads one after the other, and likewise its values. All heads of a run
// take their scores of 64 keys before the next 64 are read, and likewise the values. So memory is read in long
// stretches, which the processor's prefetcher needs to be of use.
#include "attention_amx_run.h"
#include "attention_latent.h"
#include "attention_run.h"
#include "attention_softmax.h"

namespace fdsd {
namespace FDSD_ISA {

// What a run leaves to itself between its three passes over a partition. AMX tiles read and write whole tiles of
// vectors.
template <typename T>
struct RunScratch {
  static constexpr int kVectors = kMaxRunVectors + (kHasAmx<T> ? kAmxVectors - 1 : 0);
  alignas(64) float scores[kVectors * kPartitionKeys];
  alignas(64) typename KvDot<T>::Weight weights[kVectors * kPartitionKeys];
  alignas(64) float factors[kPartitionBlocks * kMaxRunVectors];
};

// Partial results of a run: that of vector i of its head h is at h * head_stride + i, in units of one.
struct RunPartials {
  float* base;
  int64_t head_stride;
};

// Q is the type of q and y, T that of the cache.
template <typename Q, typename T>
class TileRun {
 public:
  using Query = QueryVector<typename KvDot<T>::Query>;

  //   prepared   [T * Hq], all query vectors of the call, if they are converted
  //   amx        what RunPartition multiplies with instead of vector instructions, or nullptr
  TileRun(const CascadeAppendAttentionParams& p, const AttentionRun& run, const Query* prepared,
          const AmxAttention* amx)
      : p_(p),
        keys_(p, run),
        num_heads_(keys_.num_heads()),
        num_vectors_(keys_.num_vectors()),
        head_dim_(keys_.head_dim()),
        queries_(QueriesOf(p, keys_, prepared)),
        amx_(amx, keys_, queries_.of) {}

  int num_vectors() const { return num_vectors_; }

  // partials = the run's vectors over the keys of one partition.
  void RunPartition(int32_t partition, RunScratch<T>* scratch, const RunPartials& partials) const {
    const int32_t begin = partition * kPartitionKeys;
    const int32_t end = std::min(begin + kPartitionKeys, keys_.NumKeys(num_vectors_ - 1));
    const int num_blocks = (end - begin + kBlockKeys - 1) / kBlockKeys;
    KvBlock<T> blocks[kPartitionBlocks];  // of the first head
    for (int b = 0; b < num_blocks; ++b) blocks[b] = keys_.Locate(begin + b * kBlockKeys);
    if (p_.cache.v == nullptr) WriteValuesOfKeys(blocks, num_blocks);
    // Head h of block b, or what follows its last head.
    const auto block_at = [&](int b, int h) {
      if (h == num_heads_) return blocks[std::min(b + 1, num_blocks - 1)];
      return keys_.At(blocks[b], h);
    };
    const int first_block = std::max(0, keys_.FirstKey(0) - begin) / kBlockKeys;
    for (int b = first_block; b < num_blocks; ++b) {
      for (int h = 0; h < num_heads_; ++h) {
        const KvBlock<T> next = block_at(b, h + 1);
        ScoreBlock(h, begin + b * kBlockKeys, block_at(b, h), next.k, scratch->scores + b * kBlockKeys);
      }
    }
    for (int h = 0; h < num_heads_; ++h) {
      Scales scales;
      for (int b = 0; b < num_blocks; ++b) scales.Read(keys_.At(blocks[b], h), b);
      for (int i = keys_.FirstVectorAt(begin); i < keys_.EndVectorBefore(end); ++i) {
        WeighVector(h, i, keys_.Seen(i, begin, kPartitionKeys), num_blocks, scales, scratch, At(partials, h, i));
      }
    }
    if constexpr (kHasAmx<T>) {
      if (amx_.is_used()) return AddPartition(begin, end, blocks, num_blocks, *scratch, partials);
    }
    for (int b = first_block; b < num_blocks; ++b) {
      for (int h = 0; h < num_heads_; ++h) {
        const KvBlock<T> next = block_at(b, h + 1);
        AddBlock(h, begin + b * kBlockKeys, block_at(b, h), next.v, *scratch, partials);
      }
    }
  }

  // partials = partials and then `next`, for all vectors.
  void MergePartials(const RunPartials& next, const RunPartials& partials) const {
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = 0; i < num_vectors_; ++i) Merge(At(next, h, i), head_dim_, At(partials, h, i));
    }
  }

  // partials = partials and then those of the tile's partition. A vector begins with the first one that it sees.
  void MergePartition(int32_t partition, const RunPartials& next, const RunPartials& partials) const {
    const int32_t begin = partition * kPartitionKeys;
    const int last = keys_.EndVectorBefore(begin + kPartitionKeys);
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = keys_.FirstVectorAt(begin); i < last; ++i) {
        if (partition > 0 && keys_.FirstKey(i) >= begin) {
          std::memcpy(At(partials, h, i).sums, At(next, h, i).sums, PartialSize(head_dim_) * sizeof(float));
        } else {
          Merge(At(next, h, i), head_dim_, At(partials, h, i));
        }
      }
    }
  }

  // y of the run's vectors from their merged results.
  void Finish(const RunPartials& totals) const {
    for (int h = 0; h < num_heads_; ++h) {
      for (int i = 0; i < num_vectors_; ++i) {
        const Partial total = At(totals, h, i);
        const int64_t index = keys_.Index(h, i);
        if (p_.sinks != nullptr) MergeSink(p_.sinks[index % p_.num_heads] * kLog2E, head_dim_, total);
        Q* y = static_cast<Q*>(p_.y) + index * head_dim_;
        const F32x16 weight = Set1(*total.weight);
        for (int d = 0; d < head_dim_; d += kLanes) Store(Div(Load(total.sums + d), weight), y + d);
      }
    }
  }

 private:
  using Kv = KvDot<T>;

  // The run's query vectors, those of a head one after another.
  struct Queries {
    Query of[kMaxRunVectors];
  };
  static Queries QueriesOf(const CascadeAppendAttentionParams& p, const RunKeys<T>& keys, const Query* prepared) {
    Queries queries;
    Query* query = queries.of;
    for (int h = 0; h < keys.num_heads(); ++h) {
      for (int i = 0; i < keys.num_vectors(); ++i, ++query) {
        if constexpr (Kv::kPreparesQuery) {
          *query = prepared[keys.Index(h, i)];
        } else {
          *query = {static_cast<const Q*>(p.q) + keys.Index(h, i) * keys.head_dim(), p.scores.scale * kLog2E, 0};
        }
      }
    }
    return queries;
  }

  // Scales of a partition's keys and values of one head, nullptr where there are none.
  struct Scales {
    const float* k[kPartitionBlocks][kBlockPanels];
    const float* v[kPartitionBlocks][kBlockPanels];

    void Read(const KvBlock<T>& block, int b) {
      std::copy_n(block.k_scale, kBlockPanels, k[b]);
      std::copy_n(block.v_scale, kBlockPanels, v[b]);
    }
  };

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

  // The register tiles each ask for their share of what is read next, so that memory is busy all the time. Where a few
  // vectors leave it nothing to wait for, the processor's prefetcher does better alone.
  void SetNext(const T* const* next, const T* const* current, int tile, int num_tiles, KvBlock<T>* block) const {
    for (int i = 0; i < kBlockPanels; ++i) {
      block->next[i] = num_vectors_ <= kStreamVectors ? nullptr : i % num_tiles == tile ? next[i] : current[i];
    }
  }

  // Scores of head h with the keys from `key` on, to scores[(h * num_vectors + i) * kPartitionKeys..].
  void ScoreBlock(int h, int32_t key, KvBlock<T> block, const T* const* next, float* scores) const {
    if constexpr (kHasAmx<T>) {
      if (amx_.is_used()) {
        std::copy_n(next, kBlockPanels, block.next);
        return amx_.Scores(h, key, block, scores);
      }
    }
    const int first = keys_.FirstVectorAt(key);
    const int num_tiles = (num_vectors_ - first + kScoreVectors - 1) / kScoreVectors;
    for (int i = first, tile = 0; i < num_vectors_; i += kScoreVectors, ++tile) {
      const int vector = h * num_vectors_ + i;
      SetNext(next, block.k, tile, num_tiles, &block);
      Scores<T>(std::min(kScoreVectors, num_vectors_ - i), queries_.of + vector, block,
                scores + vector * kPartitionKeys);
    }
  }

  // Turn scores of a partition's keys into weights, and begin a partial result with them.
  void WeighVector(int h, int i, KeyRange seen, int num_blocks, const Scales& scales, RunScratch<T>* scratch,
                   const Partial& partial) const {
    float* scores = ScoresAt(scratch, h, i);
    auto* const weights = WeightsAt(scratch, h, i);
    if constexpr (kHasAmx<T>) {
      if (amx_.is_used()) amx_.FinishScores(queries_.of[h * num_vectors_ + i], scales.k, seen.end, scores);
    }
    if (p_.scores.softcap > 0) CapScores(p_.scores.softcap, seen, scores);
    const float max = LargestScore(seen, scores);
    F32x16 total = Set1(0.0f);
    int offset = 0;
    for (; offset < seen.end; offset += kBlockKeys) {
      total = Add(total, Weigh<T>(max, scales.v[offset / kBlockKeys], scores + offset, weights + offset,
                                  FactorsAt(scratch, h, offset) + i));
    }
    if constexpr (kHasAmx<T>) {
      if (amx_.is_used()) std::fill(weights + offset, weights + num_blocks * kBlockKeys, typename Kv::Weight{});
    }
    for (int d = 0; d < head_dim_; d += kLanes) Store(Set1(0.0f), partial.sums + d);
    *partial.weight = ReduceAdd(total);
    *partial.max = max;
  }

  // Add the values of keys [begin, end) to the partial results; `blocks` are the first head's.
  void AddPartition(int32_t begin, int32_t end, const KvBlock<T>* blocks, int num_blocks, const RunScratch<T>& scratch,
                    const RunPartials& partials) const {
    KvBlock<T> head[2][kPartitionBlocks];  // of this head and of the next one
    for (int b = 0; b < num_blocks; ++b) head[0][b] = blocks[b];
    for (int h = 0; h < num_heads_; ++h) {
      const KvBlock<T>* const own = head[h % 2];
      KvBlock<T>* const next = head[(h + 1) % 2];
      for (int b = 0; b < num_blocks; ++b) next[b] = keys_.At(blocks[b], std::min(h + 1, num_heads_ - 1));
      amx_.AddValues({h, begin, end - begin, own, next, WeightsAt(&scratch, h, 0), FactorsAt(&scratch, h, 0),
                      At(partials, h, 0).sums, PartialSize(head_dim_)});
    }
  }

  // Add the values of the keys from `key` on to head h's partial results.
  void AddBlock(int h, int32_t key, KvBlock<T> block, const T* const* next, const RunScratch<T>& scratch,
                const RunPartials& partials) const {
    const int offset = key % kPartitionKeys;
    const int first = keys_.FirstVectorAt(key);
    const int end = keys_.EndVectorBefore(key - offset + kPartitionKeys);
    const int num_tiles = (end - first + kValueVectors - 1) / kValueVectors;
    for (int i = first, tile = 0; i < end; i += kValueVectors, ++tile) {
      SetNext(next, block.v, tile, num_tiles, &block);
      const WeightedRows<T> rows{WeightsAt(&scratch, h, i) + offset, FactorsAt(&scratch, h, offset) + i,
                                 At(partials, h, i).sums, PartialSize(head_dim_)};
      AddBlockValues(i, std::min(kValueVectors, end - i), key, block, rows);
    }
  }

  void AddBlockValues(int first, int count, int32_t key, const KvBlock<T>& block, const WeightedRows<T>& rows) const {
    if constexpr (!Kv::kSkipsHidden) {
      AddValues<T>(count, rows, block, {0, kBlockKeys});
      return;
    }
    // Whole packs that all vectors see, between those that only some do.
    constexpr int kPack = kPackSize<T>;
    const KeyRange seen = keys_.Seen(first, key, kBlockKeys);
    const int last_begin = keys_.Seen(first + count - 1, key, kBlockKeys).begin;
    KeyRange common{last_begin, seen.end / kPack * kPack};
    if (last_begin != seen.begin) common.begin = (last_begin + kPack - 1) / kPack * kPack;
    if (common.end < common.begin) common.end = common.begin;
    const auto add_own = [&](int begin, int end) {
      for (int i = 0; i < count; ++i) {
        const KeyRange own = keys_.Seen(first + i, key, kBlockKeys);
        const KeyRange keys{std::max(begin, own.begin), std::min(end, own.end)};
        const WeightedRows<T> row{rows.weights + i * kPartitionKeys, rows.factors + i, rows.sums + i * rows.sums_stride,
                                  rows.sums_stride};
        if (keys.end > keys.begin) AddValues<T>(1, row, block, keys);
      }
    };
    if (last_begin != seen.begin) add_own(0, common.begin);
    if (common.end > common.begin) AddValues<T>(count, rows, block, common);
    add_own(common.end, kBlockKeys);
  }

  const CascadeAppendAttentionParams& p_;
  const RunKeys<T> keys_;
  const int num_heads_;
  const int num_vectors_;  // of a head
  const int head_dim_;
  const Queries queries_;
  const RunAmx<T> amx_;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
