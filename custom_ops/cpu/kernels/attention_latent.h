#pragma once
// Values of a cache whose keys are its values: the keys of a partition, written as values lie in memory.
//
// Up to 64 query vectors of a tile read what was written once, so this costs a small part of their products. Then the
// products are those over any other cache.
#include "attention_dot.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

// The 16 keys of a panel, whose packs are `stride` elements apart.
FDSD_INLINE void WriteValues(const float* k, int64_t stride, int head_dim, float* v) {
  for (int d = 0; d < head_dim; ++d, k += stride)
    for (int key = 0; key < kPanelKeys; ++key) v[key * head_dim + d] = k[key];
}
FDSD_INLINE void WriteValues(const bf16* k, int64_t stride, int head_dim, bf16* v) {
  for (int d = 0; d < head_dim; d += 2, k += stride) {
    uint32_t words[kPanelKeys];
    std::memcpy(words, k, sizeof(words));
    for (int i = 0; i < kPanelKeys; i += 2) {
      const uint32_t pairs[2] = {(words[i] & 0xffffu) | words[i + 1] << 16,
                                 words[i] >> 16 | (words[i + 1] & 0xffff0000u)};
      std::memcpy(v + i * head_dim + 2 * d, pairs, sizeof(pairs));
    }
  }
}
// Such a cache has no int8.
FDSD_INLINE void WriteValues(const int8_t*, int64_t, int, int8_t*) {}

// Write the values of a partition's blocks, and let the blocks have them.
template <typename T>
void WriteValuesOfKeys(KvBlock<T>* blocks, int num_blocks) {
  const int64_t panel_size = int64_t{kPanelKeys} * blocks->head_dim;
  auto* v =
      static_cast<T*>(ScratchBytes(Scratch::kValues, kPartitionKeys / kPanelKeys * panel_size * int64_t{sizeof(T)}));
  for (int b = 0; b < num_blocks; ++b) {
    for (int i = 0; i < kBlockPanels; ++i, v += panel_size) {
      WriteValues(blocks[b].k[i], blocks[b].k_stride, blocks[b].head_dim, v);
      blocks[b].v[i] = v;
    }
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
