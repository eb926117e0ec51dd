#pragma once
// What every device makes of the arguments of rope_store_latent.
#include "fdsd/attention.h"

namespace fdsd {

// Turns the heads of queries in the same way; without keys and values to store.
inline RopeStoreKvParams RopeOfHeads(const RopeStoreLatentParams& p) {
  RopeStoreKvParams rope{};
  rope.cache = p.cache;
  rope.num_tokens = p.num_tokens;
  rope.num_heads = p.num_heads;
  rope.rotary_dim = p.rotary_dim;
  rope.max_position = p.max_position;
  rope.interleaved = p.interleaved;
  rope.qkv = p.heads;
  rope.positions = p.positions;
  rope.slot_mapping = p.slot_mapping;
  rope.cos_sin = p.cos_sin;
  rope.q = p.q;
  return rope;
}

}  // namespace fdsd
