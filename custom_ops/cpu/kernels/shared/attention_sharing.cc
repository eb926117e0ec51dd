#include "attention_sharing.h"

#include <algorithm>

#include "attention_plan.h"

namespace fdsd {
namespace {

// The whole partitions at the beginning of a request: those of which even its first row sees every key.
struct Beginning {
  int32_t request;
  int32_t num_partitions;
  int32_t num_blocks;    // that the partitions reach into
  const int32_t* table;  // [num_blocks]
};

std::vector<Beginning> Beginnings(const CascadeAppendAttentionParams& p, int32_t max_rows) {
  std::vector<Beginning> found;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
    const int32_t num_partitions = (p.seq_lens[r] - num_rows + 1) / kPartitionKeys;
    if (num_rows == 0 || num_rows > max_rows || num_partitions == 0) continue;
    const int32_t num_blocks = (num_partitions * kPartitionKeys + p.cache.block_size - 1) / p.cache.block_size;
    found.push_back({r, num_partitions, num_blocks, BlocksOf(p, r)});
  }
  return found;
}

int32_t CommonBlocks(const Beginning& a, const Beginning& b) {
  const int32_t limit = std::min(a.num_blocks, b.num_blocks);
  return static_cast<int32_t>(std::mismatch(a.table, a.table + limit, b.table).first - a.table);
}

// Puts those with the longest common beginnings next to each other.
bool IsBefore(const Beginning& a, const Beginning& b) {
  const int32_t common = CommonBlocks(a, b);
  if (common < std::min(a.num_blocks, b.num_blocks)) return a.table[common] < b.table[common];
  return a.num_blocks != b.num_blocks ? a.num_blocks < b.num_blocks : a.request < b.request;
}

int32_t CommonPartitions(const Beginning& a, const Beginning& b, int32_t block_size) {
  const int64_t num_keys = static_cast<int64_t>(CommonBlocks(a, b)) * block_size;
  const int32_t limit = std::min(a.num_partitions, b.num_partitions);
  return static_cast<int32_t>(std::min<int64_t>(num_keys / kPartitionKeys, limit));
}

}  // namespace

std::vector<SharedPrefix> FindSharedPrefixes(const CascadeAppendAttentionParams& p, int32_t max_rows) {
  std::vector<SharedPrefix> prefixes;
  std::vector<Beginning> all = Beginnings(p, max_rows);
  if (all.size() < 2) return prefixes;
  std::sort(all.begin(), all.end(), IsBefore);
  const auto common_with_next = [&](size_t i) {
    return i + 1 < all.size() ? CommonPartitions(all[i], all[i + 1], p.cache.block_size) : 0;
  };
  for (size_t i = 0; i < all.size(); ++i) {
    SharedPrefix prefix{{all[i].request}, all[i].num_partitions};
    for (int32_t common = common_with_next(i); common > 0;) {
      // Reading for n requests at once saves n - 1 readings of what all of them share. One more joins unless that saves
      // less than letting it begin a group with the one behind it.
      const auto n = static_cast<int32_t>(prefix.requests.size());
      const int32_t shared = std::min(prefix.num_partitions, common);
      common = common_with_next(i + 1);
      if (n * shared + std::min(shared, common) < (n - 1) * prefix.num_partitions + common) break;
      prefix.num_partitions = shared;
      prefix.requests.push_back(all[++i].request);
    }
    if (prefix.requests.size() > 1) prefixes.push_back(std::move(prefix));
  }
  return prefixes;
}

}  // namespace fdsd
