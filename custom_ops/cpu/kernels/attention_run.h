#pragma once
// A run's query vectors and keys: which vectors there are, which keys each of them sees, and where those lie.
#include "attention_dot.h"
#include "attention_gather.h"
#include "attention_plan.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kPartitionBlocks = kPartitionKeys / kBlockKeys;

// Vector i of a head is query head i % group of row i / group; vectors are in order of position. T is the type of the
// cache.
template <typename T>
class RunKeys {
 public:
  RunKeys(const CascadeAppendAttentionParams& p, const AttentionRun& run)
      : p_(p),
        tile_(*run.tile),
        first_head_(run.first_head),
        num_heads_(run.num_heads),
        groups_(HeadGroupsOf(p.num_heads, p.cache.num_kv_heads)),
        group_(groups_.size),
        num_vectors_(run.tile->num_rows * group_),
        head_dim_(p.cache.head_dim),
        table_(BlocksOf(p, run.tile->request)),
        gathered_(p, run) {}

  int num_heads() const { return num_heads_; }
  int num_vectors() const { return num_vectors_; }  // of a head
  int head_dim() const { return head_dim_; }
  int group() const { return group_; }

  // Which of the query vectors in q and y vector i of head h is.
  int64_t Index(int h, int i) const {
    const int64_t row = tile_.rows == nullptr ? tile_.first_row + i / group_ : tile_.rows[i / group_];
    return row * p_.num_heads + (first_head_ + h) * group_ + i % group_;
  }

  int32_t NumKeys(int i) const { return tile_.num_keys + (tile_.is_common ? 0 : i / group_); }

  // Position of the first key that vector i sees: its own one is never hidden from it.
  int32_t FirstKey(int i) const { return FirstKeySeen(p_, NumKeys(i)); }

  // Which of the keys from position `key` on vector i sees; end <= begin: none.
  KeyRange Seen(int i, int32_t key, int num_keys) const {
    return {std::max(0, FirstKey(i) - key), std::min(num_keys, NumKeys(i) - key)};
  }

  // Vectors of a head before this one see no key from position `key` on.
  int FirstVectorAt(int32_t key) const { return tile_.is_common ? 0 : std::max(0, key + 1 - tile_.num_keys) * group_; }
  // Vectors of a head from this one on see no key before position `key`.
  int EndVectorBefore(int32_t key) const {
    if (p_.scores.window <= 0) return num_vectors_;
    const int64_t num_rows = int64_t{key} + p_.scores.window - tile_.num_keys;
    return static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(num_vectors_, num_rows * group_)));
  }

  // The keys and values of the run's first head from position `key` on. Panels outside of what the tile's vectors see
  // may have no block: they repeat one inside.
  KvBlock<T> Locate(int32_t key) const {
    KvBlock<T> block{};
    block.k_stride = static_cast<int64_t>(p_.cache.block_size) * kPackSize<T>;
    block.head_dim = head_dim_;
    const int32_t last = NumKeys(num_vectors_ - 1) - 1;
    const int32_t first = std::max(key, FirstKey(0) / kPanelKeys * kPanelKeys);
    for (int i = 0; i < kBlockPanels; ++i) {
      const int32_t wanted = key + i * kPanelKeys;
      const int32_t position = wanted > last ? first : std::max(wanted, first);
      const bool is_gathered = position >= gathered_.begin();
      const KvCache& cache = is_gathered ? gathered_.cache() : p_.cache;
      const int32_t head = is_gathered ? 0 : first_head_ / groups_.per_head;
      const int32_t from_begin = is_gathered ? position - gathered_.begin() : position;
      const int32_t id = is_gathered ? from_begin / cache.block_size : table_[from_begin / cache.block_size];
      const int32_t offset = from_begin % cache.block_size;
      block.k[i] = KeyAddress<T>(cache, id, head, offset);
      if (cache.v != nullptr) block.v[i] = ValueAddress<T>(cache, id, head, offset);
      if (cache.k_scale == nullptr) continue;
      const int64_t scale = ScaleIndex(cache, id, head, offset);
      block.k_scale[i] = cache.k_scale + scale;
      block.v_scale[i] = cache.v_scale + scale;
    }
    return block;
  }

  // The same keys and values of the run's head h.
  KvBlock<T> At(KvBlock<T> block, int h) const {
    const int kv_head = (first_head_ + h) / groups_.per_head - first_head_ / groups_.per_head;
    const int64_t keys = static_cast<int64_t>(kv_head) * p_.cache.block_size;
    for (int i = 0; i < kBlockPanels; ++i) {
      block.k[i] += keys * head_dim_;
      block.v[i] += keys * head_dim_;  // a latent cache has one head
      if (p_.cache.k_scale == nullptr) continue;
      block.k_scale[i] += keys;
      block.v_scale[i] += keys;
    }
    return block;
  }

 private:
  const CascadeAppendAttentionParams& p_;
  const AttentionTile& tile_;
  const int32_t first_head_;
  const int num_heads_;
  const HeadGroups groups_;
  const int group_;
  const int num_vectors_;
  const int head_dim_;
  const int32_t* table_;
  const GatheredKeys<T> gathered_;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
