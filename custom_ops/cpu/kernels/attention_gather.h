#pragma once
// Keys and values of a row of a tree, put together as if the new tokens that it sees followed one another.
#include <climits>

#include "attention_layout.h"
#include "attention_plan.h"
#include "scratch_arrays.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

// In memory of the calling thread, until it makes the next: a cache of the run's heads alone, whose blocks are those of
// the row from the 16 keys on among which the first new token is. T is the type of the cache. Empty where the run's
// tile is no row of a tree.
template <typename T>
class GatheredKeys {
 public:
  GatheredKeys(const CascadeAppendAttentionParams& p, const AttentionRun& run) {
    const AttentionTile& tile = *run.tile;
    if (tile.seen == 0) return;
    begin_ = tile.num_before / kLanes * kLanes;
    const int32_t per_head = HeadGroupsOf(p.num_heads, p.cache.num_kv_heads).per_head;
    const int first_head = run.first_head / per_head;
    const int num_heads = (run.first_head + run.num_heads - 1) / per_head - first_head + 1;
    TakeMemory(p.cache, num_heads, tile.num_keys - begin_);
    const int32_t* const table = BlocksOf(p, tile.request);
    const auto slot = [&](int32_t position) {
      return Slot{table[position / cache_.block_size], position % cache_.block_size};
    };
    const int32_t num_old = tile.num_before - begin_;
    for (int h = 0; h < num_heads; ++h) {
      const int head = first_head + h;
      if (num_old > 0 && slot(begin_).block >= 0) CopyPanel(p.cache, slot(begin_), head, h);  // else before the window
      int32_t to = num_old;
      for (uint64_t left = tile.seen; left != 0; left &= left - 1, ++to) {
        const Slot target{to / cache_.block_size, to % cache_.block_size};
        CopyToken(p.cache, slot(tile.num_before + __builtin_ctzll(left)), head, target, h);
      }
    }
  }

  // Position of the first key that is here.
  int32_t begin() const { return begin_; }
  const KvCache& cache() const { return cache_; }

 private:
  struct Slot {
    int32_t block;
    int32_t offset;
  };

  void TakeMemory(const KvCache& from, int num_heads, int num_keys) {
    cache_ = from;
    cache_.num_kv_heads = num_heads;
    cache_.num_blocks = (num_keys + from.block_size - 1) / from.block_size;
    const int64_t num_tokens = int64_t{cache_.num_blocks} * num_heads * from.block_size;
    const auto take = [&](Arena arena) {
      cache_.k = arena.Take<T>(num_tokens * from.head_dim);
      if (from.v != nullptr) cache_.v = arena.Take<T>(num_tokens * from.head_dim);
      if (from.k_scale != nullptr) {
        cache_.k_scale = arena.Take<float>(num_tokens);
        cache_.v_scale = arena.Take<float>(num_tokens);
      }
      return arena.size();
    };
    take(Arena(static_cast<char*>(ScratchBytes(Scratch::kGathered, take(Arena(nullptr))))));
  }

  // The 16 keys from a slot on become the first ones here.
  void CopyPanel(const KvCache& from, Slot source, int head, int h) {
    const T* k = KeyAddress<T>(from, source.block, head, source.offset);
    T* to = KeyAddress<T>(cache_, 0, h, 0);
    const int64_t stride = int64_t{from.block_size} * kPackSize<T>;
    for (int64_t i = 0; i < from.head_dim / kPackSize<T>; ++i) {
      std::memcpy(to + i * stride, k + i * stride, kLanes * kPackSize<T> * sizeof(T));
    }
    if (from.v == nullptr) return;
    std::memcpy(ValueAddress<T>(cache_, 0, h, 0), ValueAddress<T>(from, source.block, head, source.offset),
                int64_t{kLanes} * from.head_dim * sizeof(T));
    if (from.k_scale == nullptr) return;
    const int64_t scale = ScaleIndex(from, source.block, head, source.offset);
    std::copy_n(from.k_scale + scale, kLanes, cache_.k_scale + ScaleIndex(cache_, 0, h, 0));
    std::copy_n(from.v_scale + scale, kLanes, cache_.v_scale + ScaleIndex(cache_, 0, h, 0));
  }

  void CopyToken(const KvCache& from, Slot source, int head, Slot target, int h) {
    const T* k = KeyAddress<T>(from, source.block, head, source.offset);
    T* k_to = KeyAddress<T>(cache_, target.block, h, target.offset);
    const int64_t stride = int64_t{from.block_size} * kPackSize<T>;
    for (int64_t i = 0; i < from.head_dim / kPackSize<T>; ++i) {
      std::memcpy(k_to + i * stride, k + i * stride, kPackSize<T> * sizeof(T));
    }
    if (from.v == nullptr) return;
    const T* v = ValueAddress<T>(from, source.block, head, source.offset);
    T* v_to = ValueAddress<T>(cache_, target.block, h, target.offset);
    for (int64_t d = 0; d < from.head_dim; ++d) v_to[d * kPackSize<T>] = v[d * kPackSize<T>];
    if (from.k_scale == nullptr) return;
    const int64_t scale = ScaleIndex(from, source.block, head, source.offset);
    const int64_t to = ScaleIndex(cache_, target.block, h, target.offset);
    cache_.k_scale[to] = from.k_scale[scale];
    cache_.v_scale[to] = from.v_scale[scale];
  }

  int32_t begin_ = INT_MAX;
  KvCache cache_{};
};

}  // namespace FDSD_ISA
}  // namespace fdsd
