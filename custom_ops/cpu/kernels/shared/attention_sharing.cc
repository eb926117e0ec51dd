#include "attention_sharing.h"

#include <algorithm>
#include <new>
#include <vector>

#include "attention_plan.h"

namespace fdsd {
namespace {

// The requests that may share, sorted.
class Sorted {
 public:
  explicit Sorted(const FindSharedPrefixesParams& p) : p_(p) {
    for (int32_t r = 0; r < p.num_requests; ++r) {
      const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
      const int32_t num_partitions = SharablePartitions(p.seq_lens[r], num_rows, p.group_size);
      if (num_partitions > 0) all_.push_back({r, num_partitions, BlocksOfPartitions(num_partitions, p.block_size), -1});
    }
    std::sort(all_.begin(), all_.end(), [this](Beginning a, Beginning b) {
      const int32_t common = CommonBlocks(a, b);
      if (common < std::min(a.num_blocks, b.num_blocks)) {
        a.next_block = BlocksOf(p_, a.request)[common];
        b.next_block = BlocksOf(p_, b.request)[common];
      }
      return IsSortedBefore(a, b, common);
    });
  }

  size_t size() const { return all_.size(); }
  const Beginning& operator[](size_t i) const { return all_[i]; }

  int32_t CommonWithNext(size_t i) const {
    if (i + 1 >= all_.size()) return 0;
    const Beginning& a = all_[i];
    const Beginning& b = all_[i + 1];
    return CommonPartitions(a.num_partitions, b.num_partitions, CommonBlocks(a, b), p_.block_size);
  }

 private:
  int32_t CommonBlocks(const Beginning& a, const Beginning& b) const {
    const int32_t* const own = BlocksOf(p_, a.request);
    const int32_t limit = std::min(a.num_blocks, b.num_blocks);
    return static_cast<int32_t>(std::mismatch(own, own + limit, BlocksOf(p_, b.request)).first - own);
  }

  const FindSharedPrefixesParams& p_;
  std::vector<Beginning> all_;
};

void Clear(const FindSharedPrefixesParams& p) {
  const SharedPrefixes& to = p.prefixes;
  std::fill_n(to.group_rows, int64_t{kMaxSharedVectors} * p.num_requests, -1);
  std::fill_n(to.group_starts, p.num_requests + 1, 0);
  std::fill_n(to.group_leaders, p.num_requests, -1);
  std::fill_n(to.group_places, p.num_requests, -1);
  std::fill_n(to.shared_partitions, p.num_requests, 0);
}

void FindGroups(const FindSharedPrefixesParams& p) {
  const SharedPrefixes& to = p.prefixes;
  const Sorted all(p);
  int32_t num_groups = 0;
  int32_t num_rows = 0;
  for (size_t begin = 0; begin < all.size();) {
    GrowingGroup group{1, all[begin].num_partitions};
    size_t end = begin + 1;
    while (end < all.size() && group.Takes(all.CommonWithNext(end - 1), all.CommonWithNext(end))) ++end;
    if (end - begin > 1) {
      to.group_leaders[num_groups++] = all[begin].request;
      for (size_t i = begin; i < end; ++i) {
        const int32_t r = all[i].request;
        to.group_places[r] = num_rows;
        to.shared_partitions[r] = group.num_partitions;
        for (int32_t row = p.query_start_loc[r]; row < p.query_start_loc[r + 1]; ++row) to.group_rows[num_rows++] = row;
      }
      to.group_starts[num_groups] = num_rows;
    }
    begin = end;
  }
  std::fill(to.group_starts + num_groups, to.group_starts + p.num_requests + 1, num_rows);
}

}  // namespace

Error FindGroupsOfRequests(const FindSharedPrefixesParams& p) {
  if (p.num_requests < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number";
  if (p.group_size <= 0) return "group_size: expected a positive number";
  if (p.query_start_loc[0] != 0) return "query_start_loc: expected to start at 0";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (const Error error = CheckRequest(p, r, p.block_size); error != nullptr) return error;
  }
  Clear(p);
  try {
    FindGroups(p);
  } catch (const std::bad_alloc&) {
    return "memory: expected room to sort the requests, got none";
  }
  return nullptr;
}

int32_t GroupAt(const CascadeAppendAttentionParams& p, int32_t place) {
  const int32_t* const starts = p.prefixes.group_starts;
  return static_cast<int32_t>(std::upper_bound(starts, starts + p.num_requests + 1, place) - starts) - 1;
}

Error CheckPrefixes(const CascadeAppendAttentionParams& p) {
  const SharedPrefixes& given = p.prefixes;
  const int32_t* const starts = given.group_starts;
  const int32_t num_group_rows = starts[p.num_requests];
  if (starts[0] != 0 || num_group_rows > int64_t{kMaxSharedVectors} * p.num_requests)
    return "group_starts: expected to start at 0 and to end within group_rows";
  for (int32_t g = 0; g < p.num_requests; ++g) {
    if (starts[g + 1] < starts[g] || (starts[g + 1] == starts[g] && starts[g] != num_group_rows))
      return "group_starts: expected offsets that rise up to the last group, got others";
    const int32_t leader = given.group_leaders[g];
    if (starts[g] < num_group_rows && (leader < 0 || leader >= p.num_requests || given.shared_partitions[leader] <= 0))
      return "group_leaders: expected a request of each group, got another";
  }
  for (int32_t i = 0; i < num_group_rows; ++i) {
    if (given.group_rows[i] < 0 || given.group_rows[i] >= p.num_tokens)
      return "group_rows: expected rows of q, got one outside";
  }
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (given.shared_partitions[r] == 0) continue;
    const int32_t num_rows = p.query_start_loc[r + 1] - p.query_start_loc[r];
    if (given.shared_partitions[r] < 0 ||
        given.shared_partitions[r] > SharablePartitions(p.seq_lens[r], num_rows, p.num_heads / p.cache.num_kv_heads))
      return "shared_partitions: expected whole ones before the new tokens, got others";
    const int32_t place = given.group_places[r];
    if (place < 0 || place >= num_group_rows) return "group_places: expected places in group_rows, got one outside";
    const int32_t g = GroupAt(p, place);
    if (place > starts[g + 1] - num_rows ||
        given.shared_partitions[given.group_leaders[g]] != given.shared_partitions[r])
      return "group_places: expected a request's rows in a group that shares as much, got others";
  }
  return nullptr;
}

}  // namespace fdsd
