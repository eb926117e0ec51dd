#pragma once
// Argument checks of adapters' ops: what follows from sizes alone; of all processors.
#include "fdsd/lora.h"

namespace fdsd {

inline Error CheckLoraSizes(int32_t num_rows, int32_t num_slots, int32_t num_parts, int32_t max_rank) {
  if (num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (num_slots < 1) return "ranks: expected one slot or more, got none";
  if (num_parts < 1) return "ranks: expected one part or more, got none";
  if (max_rank < 1) return "max_rank: expected 1 or more, got another number";
  return nullptr;
}

inline Error CheckLoraShrink(const LoraShrinkParams& p) {
  if (p.in_features < 0) return "in_features: expected 0 or more, got a negative number";
  if (p.slices.num_slices != 1 && p.slices.num_slices != 2 && p.slices.num_slices != 4)
    return "num_slices: expected 1, 2 or 4, got another number";
  if (p.slices.slice_unit < 1) return "slice_unit: expected 1 or more, got another number";
  return CheckLoraSizes(p.num_rows, p.num_slots, p.num_parts, p.max_rank);
}

inline Error CheckLoraExpand(const LoraExpandParams& p) {
  if (p.out_features < 0) return "out_features: expected 0 or more, got a negative number";
  return CheckLoraSizes(p.num_rows, p.num_slots, p.num_parts, p.max_rank);
}

}  // namespace fdsd
