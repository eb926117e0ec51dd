#pragma once
// Which requests of a call begin with the same blocks, as those do that hit the same entries of a prefix cache: the
// rule of every device. Requests are sorted by their blocks, so that those with the longest common beginnings are next
// to each other, and groups are formed from the first to the last.
#include <cstdint>

#include "fdsd/attention.h"

#if defined(__CUDACC__)
#define FDSD_EVERYWHERE __host__ __device__
#else
#define FDSD_EVERYWHERE
#endif

namespace fdsd {

constexpr int kPartitionKeys = 256;  // part of every row's arithmetic: another value gives other bits

// How many whole partitions at the beginning of a request may be read for others too: those of the tokens before its
// new ones. 0: it has no rows, or so many that they use every key often by themselves.
FDSD_EVERYWHERE constexpr int32_t SharablePartitions(int32_t length, int32_t num_rows, int32_t group_size) {
  if (num_rows <= 0 || num_rows > kMaxSharedVectors / group_size) return 0;
  return (length - num_rows) / kPartitionKeys;
}

// Blocks that so many partitions reach into.
FDSD_EVERYWHERE constexpr int32_t BlocksOfPartitions(int32_t num_partitions, int32_t block_size) {
  return static_cast<int32_t>((int64_t{num_partitions} * kPartitionKeys + block_size - 1) / block_size);
}

// A request as it is sorted: its blocks up to where it may share.
struct Beginning {
  int32_t request;
  int32_t num_partitions;
  int32_t num_blocks;
  int32_t next_block;  // after those that it has in common with the other; without meaning where that is all
};

FDSD_EVERYWHERE constexpr bool IsSortedBefore(const Beginning& a, const Beginning& b, int32_t num_common_blocks) {
  const bool is_all = num_common_blocks >= a.num_blocks || num_common_blocks >= b.num_blocks;
  if (!is_all) return a.next_block < b.next_block;
  return a.num_blocks != b.num_blocks ? a.num_blocks < b.num_blocks : a.request < b.request;
}

FDSD_EVERYWHERE constexpr int32_t CommonPartitions(int32_t a, int32_t b, int32_t num_common_blocks,
                                                   int32_t block_size) {
  const int64_t common = int64_t{num_common_blocks} * block_size / kPartitionKeys;
  const int32_t limit = a < b ? a : b;
  return common < limit ? static_cast<int32_t>(common) : limit;
}

// A group that grows, begun with one request.
struct GrowingGroup {
  int32_t num_requests;
  int32_t num_partitions;

  // Add the next request, or return false. It has `common` partitions in common with the request before it and
  // `common_behind` with the one after it. Reading for n requests at once saves n - 1 readings of what all of them
  // share. The request joins unless a new group of it and the one after it saves more.
  FDSD_EVERYWHERE constexpr bool Takes(int32_t common, int32_t common_behind) {
    const int64_t shared = num_partitions < common ? num_partitions : common;
    const int64_t with_it = num_requests * shared + (shared < common_behind ? shared : common_behind);
    if (common <= 0 || with_it < (num_requests - 1) * int64_t{num_partitions} + common_behind) return false;
    num_partitions = static_cast<int32_t>(shared);
    ++num_requests;
    return true;
  }
};

}  // namespace fdsd
