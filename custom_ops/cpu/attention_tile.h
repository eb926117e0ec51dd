#pragma once
// One KV head's share of a tile: query vectors that read the same keys, 64 at a time.
#include "attention_plan.h"
#include "attention_softmax.h"

namespace fdsd {
namespace FDSD_ISA {

// What the vectors of a tile leave to each other on their way through one block of keys.
template <typename T>
struct BlockScratch {
  alignas(64) float scores[kMaxTileVectors * kBlockKeys];
  alignas(64) typename KvDot<T>::Weight weights[kMaxTileVectors * kBlockKeys];
  alignas(64) float factors[kMaxTileVectors];
};

// Query vector i is head i % group of row i / group; vectors are in order of position. Q is the type of q and y, T that
// of the cache.
template <typename Q, typename T>
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
    for (int i = 0; i < num_vectors_; ++i) {
      const Q* q = static_cast<const Q*>(p.q) + Offset(i);
      q_[i] = KvDot<T>::PrepareQuery(q, head_dim_, p.scale * kLog2E, prepared_ + i * kPreparedSize);
    }
  }

  int num_vectors() const { return num_vectors_; }

  // Vectors before this one see no key of the partition.
  int FirstVector(int32_t partition) const { return FirstVectorAt(partition * kPartitionKeys); }

  // partials[i] = query vector i over the keys of one partition.
  void RunPartition(int32_t partition, BlockScratch<T>* scratch, float* partials) const {
    for (int i = FirstVector(partition); i < num_vectors_; ++i) Clear(PartialAt(partials, i, head_dim_), head_dim_);
    const int32_t begin = partition * kPartitionKeys;
    const int32_t end = std::min(begin + kPartitionKeys, NumKeys(num_vectors_ - 1));
    Panels current = Locate(begin);
    for (int32_t key = begin; key < end; key += kBlockKeys) {
      // What comes next is known: the first block of the next partition too, unless this is the last key of all.
      const Panels next = key + kBlockKeys < NumKeys(num_vectors_ - 1) ? Locate(key + kBlockKeys) : current;
      RunBlock(key, current, next, scratch, partials);
      current = next;
    }
  }

  // y of query vector i from its merged result.
  void Finish(int i, const Partial& total) const {
    Q* y = static_cast<Q*>(p_.y) + Offset(i);
    const F32x16 weight = Set1(ReduceAdd(Load(total.weights)));
    for (int d = 0; d < head_dim_; d += kLanes) Store(Div(Load(total.sums + d), weight), y + d);
  }

 private:
  using Kv = KvDot<T>;
  using Query = QueryVector<typename Kv::Query>;
  // Elements that a prepared query vector needs room for; most types use q as it is.
  static constexpr int kPreparedSize = Kv::kPreparesQuery ? kMaxHeadDim : 0;

  // The 64 keys and values from one position on.
  struct Panels {
    const T* k[kBlockPanels];
    const T* v[kBlockPanels];
    const float* k_scale[kBlockPanels];
    const float* v_scale[kBlockPanels];
  };

  // First element of query vector i in q and y.
  int64_t Offset(int i) const {
    const int64_t row = tile_.rows == nullptr ? tile_.first_row + i / group_ : tile_.rows[i / group_];
    return (row * p_.num_heads + kv_head_ * group_ + i % group_) * head_dim_;
  }

  // Rows of several requests see every key of their tile.
  int32_t NumKeys(int i) const { return tile_.num_keys + (tile_.rows == nullptr ? i / group_ : 0); }

  // Which of the 64 keys from position `key` on query vector i sees: its own one is never hidden from it.
  KeyRange Seen(int i, int32_t key) const {
    return {std::max(0, std::min(p_.first_key, NumKeys(i) - 1) - key), std::min(kBlockKeys, NumKeys(i) - key)};
  }

  int FirstVectorAt(int32_t key) const {
    return tile_.rows == nullptr ? std::max(0, key + 1 - tile_.num_keys) * group_ : 0;
  }

  void LocatePanel(int32_t position, int i, Panels* panels) const {
    const int32_t id = table_[position / p_.cache.block_size];
    const int32_t offset = position % p_.cache.block_size;
    panels->k[i] = KeyAddress<T>(p_.cache, id, kv_head_, offset);
    panels->v[i] = ValueAddress<T>(p_.cache, id, kv_head_, offset);
    if (p_.cache.k_scale == nullptr) return;
    const int64_t scale = ScaleIndex(p_.cache, id, kv_head_, offset);
    panels->k_scale[i] = p_.cache.k_scale + scale;
    panels->v_scale[i] = p_.cache.v_scale + scale;
  }

  // Panels behind the last key of the tile may have no block: they repeat the first one.
  Panels Locate(int32_t key) const {
    Panels panels{};
    const int32_t last = NumKeys(num_vectors_ - 1) - 1;
    for (int i = 0; i < kBlockPanels; ++i) {
      LocatePanel(key + i * kPanelKeys <= last ? key + i * kPanelKeys : key, i, &panels);
    }
    return panels;
  }

  // Each of the register tiles asks for its share of the next block, so that memory is busy all the time.
  KvBlock<T> BlockOf(const Panels& current, const Panels& next, int tile, int num_tiles) const {
    KvBlock<T> block;
    block.k_stride = static_cast<int64_t>(p_.cache.block_size) * kPackSize<T>;
    block.head_dim = head_dim_;
    for (int i = 0; i < kBlockPanels; ++i) {
      const Panels& wanted = i % num_tiles == tile ? next : current;
      block.k[i] = current.k[i];
      block.v[i] = current.v[i];
      block.k_scale[i] = current.k_scale[i];
      block.next_k[i] = wanted.k[i];
      block.next_v[i] = wanted.v[i];
    }
    return block;
  }

  void RunBlock(int32_t key, const Panels& current, const Panels& next, BlockScratch<T>* scratch,
                float* partials) const {
    const int first = FirstVectorAt(key);
    const int num_tiles = (num_vectors_ - first + kTileVectors - 1) / kTileVectors;
    for (int i = first, tile = 0; i < num_vectors_; i += kTileVectors, ++tile) {
      const KvBlock<T> block = BlockOf(current, next, tile, num_tiles);
      Scores<T>(std::min(kTileVectors, num_vectors_ - i), q_ + i, block, scratch->scores + i * kBlockKeys);
    }
    for (int i = first; i < num_vectors_; ++i) {
      Reweigh<T>(Seen(i, key), head_dim_, current.v_scale, scratch->scores + i * kBlockKeys,
                 scratch->weights + i * kBlockKeys, scratch->factors + i, PartialAt(partials, i, head_dim_));
    }
    for (int i = first, tile = 0; i < num_vectors_; i += kTileVectors, ++tile) {
      const KvBlock<T> block = BlockOf(current, next, tile, num_tiles);
      AddBlockValues(i, std::min(kTileVectors, num_vectors_ - i), key, block, *scratch, partials);
    }
  }

  void AddBlockValues(int first, int count, int32_t key, const KvBlock<T>& block, const BlockScratch<T>& scratch,
                      float* partials) const {
    const int64_t stride = PartialSize(head_dim_);
    const auto rows = [&](int i) -> WeightedRows<T> {
      return {scratch.weights + i * kBlockKeys, scratch.factors + i, partials + i * stride, stride};
    };
    if constexpr (!Kv::kSkipsHidden) {
      AddValues<T>(count, rows(first), block, {0, kBlockKeys});
      return;
    }
    // Vectors on both sides of first_key have no key in common.
    const KeyRange seen = Seen(first, key);
    const bool is_aligned = seen.begin == Seen(first + count - 1, key).begin;
    const int common = is_aligned ? seen.end / kPackSize<T> * kPackSize<T> : 0;
    if (common > seen.begin) AddValues<T>(count, rows(first), block, {seen.begin, common});
    for (int i = first; i < first + count; ++i) {
      const KeyRange own = Seen(i, key);
      const int begin = std::max(common, own.begin);
      if (own.end > begin) AddValues<T>(1, rows(i), block, {begin, own.end});
    }
  }

  const CascadeAppendAttentionParams& p_;
  const AttentionTile& tile_;
  const int32_t kv_head_;
  const int group_;
  const int num_vectors_;
  const int head_dim_;
  const int32_t* table_;
  Query q_[kMaxTileVectors];
  alignas(64) typename Kv::Query prepared_[kMaxTileVectors * kPreparedSize + 1];
};

}  // namespace FDSD_ISA
}  // namespace fdsd
