// Which requests begin with the same blocks, by the rule of every device (attention_sharing.h), once for all layers of
// a pass: two launches, whatever the requests have in common.
#include "attention_sharing.h"
#include "ops.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
// Of so many requests the second kernel's numbers find room in shared memory, of more in the workspace.
constexpr int32_t kMaxRequestsInShared = 4096;

struct SharingShape {
  int32_t num_requests;
  int32_t max_blocks;
  int32_t block_size;
  int32_t group_size;
};

struct SharingArrays {
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> seq_lens;
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> block_tables;
  DevicePtr<int32_t> group_rows;
  DevicePtr<int32_t> group_starts;
  DevicePtr<int32_t> group_leaders;
  DevicePtr<int32_t> group_places;
  DevicePtr<int32_t> shared_partitions;
  DevicePtr<int32_t> order;   // in the workspace: [R], the requests that may share, sorted
  DevicePtr<int32_t> sorted;  // likewise, see SortedNumbers; nullptr: in shared memory
};

__device__ __forceinline__ int32_t NumRows(const SharingArrays& a, int32_t r) {
  return a.query_start_loc[r + 1] - a.query_start_loc[r];
}

__device__ Beginning BeginningOf(const SharingShape& shape, const SharingArrays& a, int32_t r) {
  const int32_t num_partitions = SharablePartitions(a.seq_lens[r], NumRows(a, r), shape.group_size);
  return Beginning{r, num_partitions, BlocksOfPartitions(num_partitions, shape.block_size), -1};
}

__device__ __forceinline__ DevicePtr<const int32_t> BlocksOf(const SharingShape& shape, const SharingArrays& a,
                                                             int32_t r) {
  return a.block_tables + static_cast<int64_t>(a.table_rows[r]) * shape.max_blocks;
}

// How many blocks two requests begin with, and the next block of each. All lanes of a warp.
__device__ int32_t CommonBlocks(const SharingShape& shape, const SharingArrays& a, Beginning* one, Beginning* other) {
  constexpr int kLoads = 4;  // that wait for memory together
  const int lane = threadIdx.x % kWarpSize;
  const int32_t limit = min(one->num_blocks, other->num_blocks);
  const DevicePtr<const int32_t> blocks = BlocksOf(shape, a, one->request);
  const DevicePtr<const int32_t> other_blocks = BlocksOf(shape, a, other->request);
  for (int32_t begin = 0; begin < limit; begin += kLoads * kWarpSize) {
    bool is_other[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t at = begin + i * kWarpSize + lane;
      is_other[i] = at < limit && blocks[at] != other_blocks[at];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const unsigned found = __ballot_sync(kAllLanes, is_other[i]);
      if (found == 0) continue;
      const int32_t common = begin + i * kWarpSize + __ffs(static_cast<int>(found)) - 1;
      one->next_block = blocks[common];
      other->next_block = other_blocks[common];
      return common;
    }
  }
  return limit;
}

// Block r counts the requests that are sorted before request r, each compared by a warp.
__global__ __launch_bounds__(kThreads) void SortKernel(SharingShape shape, SharingArrays a) {
  FDSD_SHARED(int32_t, counts, kWarps);
  const auto r = static_cast<int32_t>(blockIdx.x);
  const Beginning own = BeginningOf(shape, a, r);
  if (own.num_partitions == 0) return;
  const int warp = threadIdx.x / kWarpSize;
  int32_t count = 0;
  for (int32_t i = warp; i < shape.num_requests; i += kWarps) {
    Beginning other = BeginningOf(shape, a, i);
    if (i == r || other.num_partitions == 0) continue;
    Beginning one = own;
    const int32_t common = CommonBlocks(shape, a, &one, &other);
    if (IsSortedBefore(other, one, common)) ++count;
  }
  if (threadIdx.x % kWarpSize == 0) counts[warp] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t rank = 0;
  for (int w = 0; w < kWarps; ++w) rank += counts[w];
  a.order[rank] = r;
}

// What the one thread that forms groups reads, of each sorted request.
constexpr int64_t kSortedNumbers = 4;
struct SortedNumbers {
  DevicePtr<int32_t> requests;
  DevicePtr<int32_t> num_rows;
  DevicePtr<int32_t> num_partitions;
  DevicePtr<int32_t> common_with_next;

  __device__ SortedNumbers(DevicePtr<int32_t> memory, int64_t num_requests)
      : requests(memory),
        num_rows(requests + num_requests),
        num_partitions(num_rows + num_requests),
        common_with_next(num_partitions + num_requests) {}
};

// One thread: a request after the other. Returns the number of groups.
__device__ int32_t FormGroups(const SharingArrays& a, const SortedNumbers& sorted, int32_t count, int32_t* num_rows) {
  int32_t num_groups = 0;
  int32_t place = 0;
  for (int32_t begin = 0; begin < count;) {
    GrowingGroup group{1, sorted.num_partitions[begin]};
    int32_t end = begin + 1;
    while (end < count && group.Takes(sorted.common_with_next[end - 1], sorted.common_with_next[end])) ++end;
    if (end - begin > 1) {
      a.group_leaders[num_groups] = sorted.requests[begin];
      a.group_starts[num_groups] = place;
      ++num_groups;
      for (int32_t i = begin; i < end; ++i) {
        a.group_places[sorted.requests[i]] = place;
        a.shared_partitions[sorted.requests[i]] = group.num_partitions;
        place += sorted.num_rows[i];
      }
    }
    begin = end;
  }
  *num_rows = place;
  return num_groups;
}

// One block.
__global__ __launch_bounds__(kThreads) void GroupKernel(SharingShape shape, SharingArrays a) {
  FDSD_SHARED(int32_t, totals, 2);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t num_requests = shape.num_requests;
  int32_t num_own = 0;
  for (int32_t r = thread; r < num_requests; r += kThreads) {
    if (BeginningOf(shape, a, r).num_partitions > 0) ++num_own;
    a.group_places[r] = -1;
    a.shared_partitions[r] = 0;
  }
  int32_t count;
  BlockRunningSum<kThreads>(num_own, &count);
  const SortedNumbers sorted(a.sorted == nullptr ? DynamicShared<int32_t>() : a.sorted, num_requests);
  for (int32_t i = thread / kWarpSize; i < count; i += kWarps) {
    Beginning one = BeginningOf(shape, a, a.order[i]);
    int32_t common = 0;
    if (i + 1 < count) {
      Beginning other = BeginningOf(shape, a, a.order[i + 1]);
      const int32_t num_blocks = CommonBlocks(shape, a, &one, &other);
      common = CommonPartitions(one.num_partitions, other.num_partitions, num_blocks, shape.block_size);
    }
    if (thread % kWarpSize != 0) continue;
    sorted.requests[i] = one.request;
    sorted.num_rows[i] = NumRows(a, one.request);
    sorted.num_partitions[i] = one.num_partitions;
    sorted.common_with_next[i] = common;
  }
  __syncthreads();
  if (thread == 0) {
    int32_t num_rows;
    totals[0] = FormGroups(a, sorted, count, &num_rows);
    totals[1] = num_rows;
  }
  __syncthreads();
  const int32_t num_groups = totals[0];
  const int32_t num_rows = totals[1];
  for (int32_t g = num_groups + thread; g <= num_requests; g += kThreads) {
    a.group_starts[g] = num_rows;
    if (g < num_requests) a.group_leaders[g] = -1;
  }
  for (int32_t r = thread; r < num_requests; r += kThreads) {
    const int32_t place = a.group_places[r];
    if (place < 0) continue;
    const int32_t begin = a.query_start_loc[r];
    for (int32_t i = 0; i < NumRows(a, r); ++i) a.group_rows[place + i] = begin + i;
  }
  for (int32_t i = num_rows + thread; i < num_requests * kMaxSharedVectors; i += kThreads) a.group_rows[i] = -1;
}

}  // namespace

int64_t FindSharedPrefixesWorkspaceBytes(const FindSharedPrefixesParams& p) {
  const int64_t num_numbers = 1 + (p.num_requests > kMaxRequestsInShared ? kSortedNumbers : 0);
  return p.num_requests * num_numbers * static_cast<int64_t>(sizeof(int32_t));
}

Error FindSharedPrefixes(const FindSharedPrefixesParams& p, void* workspace, Stream stream) {
  if (p.num_requests < 0 || p.max_blocks < 0) return "sizes: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number";
  if (p.group_size <= 0) return "group_size: expected a positive number";
  const SharingShape shape{p.num_requests, p.max_blocks, p.block_size, p.group_size};
  const bool is_shared = p.num_requests <= kMaxRequestsInShared;
  auto* const order = static_cast<int32_t*>(workspace);
  const SharingArrays arrays{DevicePtr<const int32_t>(p.query_start_loc),
                             DevicePtr<const int32_t>(p.seq_lens),
                             DevicePtr<const int32_t>(p.table_rows),
                             DevicePtr<const int32_t>(p.block_tables),
                             DevicePtr<int32_t>(p.prefixes.group_rows),
                             DevicePtr<int32_t>(p.prefixes.group_starts),
                             DevicePtr<int32_t>(p.prefixes.group_leaders),
                             DevicePtr<int32_t>(p.prefixes.group_places),
                             DevicePtr<int32_t>(p.prefixes.shared_partitions),
                             DevicePtr<int32_t>(order),
                             DevicePtr<int32_t>(is_shared ? nullptr : order + p.num_requests)};
  LaunchShape launch{dim3(static_cast<unsigned>(p.num_requests)), dim3(kThreads)};
  if (Error error = Launch<SortKernel>(launch, stream, shape, arrays)) return error;
  const int64_t shared_bytes = is_shared ? kSortedNumbers * p.num_requests * static_cast<int64_t>(sizeof(int32_t)) : 0;
  launch = LaunchShape{dim3(1), dim3(kThreads), static_cast<int32_t>(shared_bytes)};
  return Launch<GroupKernel>(launch, stream, shape, arrays);
}

}  // namespace fdsd::cuda
