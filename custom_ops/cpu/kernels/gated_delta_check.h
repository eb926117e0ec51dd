#pragma once
// Argument checks of gated delta nets.
#include "fdsd/gated_delta.h"

namespace fdsd {

// What follows from sizes alone; of all processors.
inline Error CheckGatedDeltaSizes(const GatedDeltaNetParams& p) {
  if (p.num_requests < 0 || p.num_tokens < 0 || p.num_snapshots < 0 || p.max_drafts < 0)
    return "sizes: expected no negative number";
  if (p.heads.num_key_heads <= 0 || p.heads.num_value_heads <= 0 ||
      p.heads.num_value_heads % p.heads.num_key_heads != 0)
    return "state: expected a multiple of the key heads in conv_weight, got another number of heads";
  if (p.heads.key_dim <= 0 || p.heads.value_dim <= 0) return "state: expected heads of a positive size, got less";
  if (p.conv_width < 2 || p.conv_width > 8) return "conv_weight: expected 2..8 rows, got a number outside";
  if (p.num_table_rows < 0 || p.num_slots < p.num_table_rows)
    return "state: expected a slot for every table row of draft_rows, got fewer";
  return nullptr;
}

// What is in the arrays, whose sizes were checked.
Error CheckGatedDeltaStates(const GatedDeltaNetParams& p);

}  // namespace fdsd
