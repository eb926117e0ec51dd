#include <algorithm>

#include "attention_plan.h"

namespace fdsd {

AttentionRun RunAt(const AttentionPlan& plan, int64_t begin, int64_t end) {
  const auto starts_after = [](int64_t unit, const AttentionTile& tile) { return unit < tile.first_unit; };
  const AttentionTile* const tiles_end = plan.tiles + plan.num_tiles;
  const AttentionTile* tile = std::upper_bound(plan.tiles, tiles_end, begin, starts_after) - 1;
  const int64_t heads = plan.num_groups;
  for (; tile != tiles_end; ++tile) {
    if (tile->num_parts == 0) continue;
    const int64_t offset = std::max<int64_t>(begin - tile->first_unit, 0);
    int64_t part = std::min<int64_t>(offset / (heads * tile->part_units), tile->num_parts - 1);
    const auto units = [&] { return part == tile->num_parts - 1 ? tile->last_part_units : tile->part_units; };
    int64_t head = (offset - part * heads * tile->part_units + units() - 1) / units();
    if (head >= heads) {
      head = 0;
      if (++part >= tile->num_parts) continue;
    }
    const int64_t start = tile->first_unit + part * heads * tile->part_units + head * units();
    const int64_t begun = (end - start + units() - 1) / units();
    if (begun <= 0) break;
    const int64_t num_heads = std::min({begun, heads - head, int64_t{tile->heads_per_run}});
    return {tile, tile->num_parts == 1 ? -1 : tile->first_partition + static_cast<int32_t>(part),
            static_cast<int32_t>(head), static_cast<int32_t>(num_heads), start + num_heads * units()};
  }
  return {nullptr, -1, 0, 0, end};
}

AttentionRun MergesAt(const AttentionPlan& plan, int64_t begin, int64_t end) {
  const auto starts_after = [](int64_t merge, const AttentionTile& tile) { return merge < tile.first_merge; };
  const AttentionTile* tile = std::upper_bound(plan.tiles, plan.tiles + plan.num_tiles, begin, starts_after) - 1;
  const int64_t head = begin - tile->first_merge;
  const int64_t num_heads = std::min({end - begin, plan.num_groups - head, int64_t{tile->heads_per_run}});
  return {tile, -1, static_cast<int32_t>(head), static_cast<int32_t>(num_heads), begin + num_heads};
}

}  // namespace fdsd
