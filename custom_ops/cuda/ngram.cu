// Drafts from the requests' own texts. Every end of an earlier stretch of a text is looked at by a thread of its own:
// how many tokens before it are those at the end of the text. The longest of these, and of equal ones the last, is the
// greatest of integers.
#include "fdsd/ngram.h"
#include "numbers.h"
#include "ops.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;
// Places of a text that a block looks at.
constexpr int kPartPlaces = kThreads * 16;
using Match = unsigned long long;  // high half: tokens that agree, low half: the place after them; 0 = none

struct NgramShape {
  int32_t num_requests;
  int32_t min_n;
  int32_t max_n;
  double max_factor;
  int32_t max_tokens_per_row;
  int32_t num_parts;
};

struct NgramArrays {
  DevicePtr<const int32_t> token_table;
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> num_tokens;
  DevicePtr<const int32_t> prefix_token_ids;
  DevicePtr<const int32_t> cu_num_prefix;  // nullptr = no request has one
  DevicePtr<const int32_t> max_draft_len;
  DevicePtr<int32_t> draft_token_ids;
  DevicePtr<int32_t> cu_num_draft;
  DevicePtr<int32_t> num_matched;
  // In the workspace:
  DevicePtr<Match> matches;   // [R, num_parts]
  DevicePtr<int32_t> places;  // [R] where a draft is copied from
};

// Committed tokens, then the prefix.
struct DraftedText {
  DevicePtr<const int32_t> committed;
  DevicePtr<const int32_t> prefix;
  int32_t num_committed;
  int32_t size;

  __device__ DraftedText(const NgramShape& shape, const NgramArrays& a, int32_t r)
      : committed(a.token_table + static_cast<int64_t>(a.table_rows[r]) * shape.max_tokens_per_row),
        prefix(nullptr),
        num_committed(a.num_tokens[r]),
        size(num_committed) {
    if (a.cu_num_prefix == nullptr) return;
    prefix = a.prefix_token_ids + a.cu_num_prefix[r];
    size += a.cu_num_prefix[r + 1] - a.cu_num_prefix[r];
  }

  __device__ __forceinline__ int32_t at(int32_t i) const {
    return i < num_committed ? committed[i] : prefix[i - num_committed];
  }

  // How many tokens before place `end` are those at the end of the text, at most max_n.
  __device__ __forceinline__ int32_t AgreedBefore(int32_t end, int32_t max_n) const {
    int32_t n = 0;
    while (n < max_n && n < end && committed[end - 1 - n] == at(size - 1 - n)) ++n;
    return n;
  }
};

__device__ __forceinline__ Match WarpGreatestMatch(Match match) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    const Match other = __shfl_xor_sync(kAllLanes, match, lanes);
    if (other > match) match = other;
  }
  return match;
}

// Block (request, part): kPartPlaces places of a text.
__global__ __launch_bounds__(kThreads) void FindMatchesKernel(NgramShape shape, NgramArrays a) {
  FDSD_SHARED(Match, greatest, kThreads / kWarpSize);
  const auto r = static_cast<int32_t>(blockIdx.x);
  const DraftedText text(shape, a, r);
  const auto begin = static_cast<int32_t>(blockIdx.y) * kPartPlaces;
  Match match = 0;
  if (a.max_draft_len[r] > 0) {
    const int32_t last = min(text.num_committed, text.size - 1);
    for (int32_t place = begin + 1 + static_cast<int32_t>(threadIdx.x); place <= min(begin + kPartPlaces, last);
         place += kThreads) {
      const int32_t n = text.AgreedBefore(place, shape.max_n);
      const Match own = static_cast<Match>(n) << 32 | static_cast<Match>(place);
      if (n >= shape.min_n && own > match) match = own;
    }
  }
  match = WarpGreatestMatch(match);
  if (threadIdx.x % kWarpSize == 0) greatest[threadIdx.x / kWarpSize] = match;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / kWarpSize; ++warp) {
    const Match other = greatest[warp];
    if (other > match) match = other;
  }
  a.matches[static_cast<int64_t>(r) * shape.num_parts + blockIdx.y] = match;
}

// One block: how many drafts each request gets, and from where.
__global__ __launch_bounds__(kThreads) void PlaceDraftsKernel(NgramShape shape, NgramArrays a) {
  int32_t num_drafts = 0;
  if (threadIdx.x == 0) a.cu_num_draft[0] = 0;
  for (int32_t first = 0; first < shape.num_requests; first += kThreads) {
    const int32_t r = first + static_cast<int32_t>(threadIdx.x);
    int32_t own = 0;
    if (r < shape.num_requests) {
      Match match = 0;
      for (int32_t part = 0; part < shape.num_parts; ++part) {
        const Match other = a.matches[static_cast<int64_t>(r) * shape.num_parts + part];
        if (other > match) match = other;
      }
      const auto num_matched = static_cast<int32_t>(match >> 32);
      a.num_matched[r] = num_matched;
      a.places[r] = static_cast<int32_t>(match & 0xffffffffu);
      // A product that should be whole may come out a little below.
      constexpr double kRounding = 1e-9;
      const double most = static_cast<double>(num_matched) * shape.max_factor + kRounding;
      own = static_cast<int32_t>(fmin(static_cast<double>(static_cast<int32_t>(a.max_draft_len[r])), most));
    }
    int32_t more;
    const int32_t end = num_drafts + BlockRunningSum<kThreads>(own, &more);
    if (r < shape.num_requests) a.cu_num_draft[r + 1] = end;
    num_drafts += more;
  }
}

// Block (request): its drafts.
__global__ __launch_bounds__(kThreads) void CopyDraftsKernel(NgramShape shape, NgramArrays a) {
  const auto r = static_cast<int32_t>(blockIdx.x);
  const int32_t begin = a.cu_num_draft[r];
  const int32_t num_drafts = a.cu_num_draft[r + 1] - begin;
  if (num_drafts == 0) return;
  const DraftedText text(shape, a, r);
  const int32_t place = a.places[r];
  // What follows the place up to the end of the text, again and again.
  const int32_t period = text.size - place;
  for (int32_t i = threadIdx.x; i < num_drafts; i += kThreads)
    a.draft_token_ids[begin + i] = text.at(place + i % period);
}

int32_t NumParts(const NgramMatchParams& p) {
  const auto num_parts = static_cast<int32_t>(DivideUp(p.texts.max_tokens_per_row, kPartPlaces));
  return num_parts > 0 ? num_parts : 1;
}

}  // namespace

int64_t NgramMatchWorkspaceBytes(const NgramMatchParams& p) {
  return p.num_requests * (NumParts(p) * static_cast<int64_t>(sizeof(Match)) + static_cast<int64_t>(sizeof(int32_t)));
}

Error NgramMatch(const NgramMatchParams& p, void* workspace, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.min_n < 1) return "min_n: expected at least 1, got less";
  if (p.max_n < p.min_n) return "max_n: expected at least min_n, got less";
  if (!(p.max_factor > 0)) return "max_factor: expected a positive number, got another";
  if (p.texts.max_tokens_per_row < 0) return "max_tokens_per_row: expected no negative number";
  const NgramShape shape{p.num_requests, p.min_n, p.max_n, p.max_factor, p.texts.max_tokens_per_row, NumParts(p)};
  auto* const matches = static_cast<Match*>(workspace);
  const NgramArrays arrays{DevicePtr<const int32_t>(p.texts.token_table),
                           DevicePtr<const int32_t>(p.texts.table_rows),
                           DevicePtr<const int32_t>(p.texts.num_tokens),
                           DevicePtr<const int32_t>(p.texts.prefix_token_ids),
                           DevicePtr<const int32_t>(p.texts.cu_num_prefix),
                           DevicePtr<const int32_t>(p.drafts.max_draft_len),
                           DevicePtr<int32_t>(p.drafts.draft_token_ids),
                           DevicePtr<int32_t>(p.drafts.cu_num_draft),
                           DevicePtr<int32_t>(p.drafts.num_matched),
                           DevicePtr<Match>(matches),
                           DevicePtr<int32_t>(matches + static_cast<int64_t>(p.num_requests) * shape.num_parts)};
  const auto num_requests = static_cast<unsigned>(p.num_requests);
  const LaunchShape parts{dim3(num_requests, static_cast<unsigned>(shape.num_parts)), dim3(kThreads)};
  if (Error error = Launch<FindMatchesKernel>(parts, stream, shape, arrays)) return error;
  if (Error error = Launch<PlaceDraftsKernel>(LaunchShape{dim3(1), dim3(kThreads)}, stream, shape, arrays))
    return error;
  return Launch<CopyDraftsKernel>(LaunchShape{dim3(num_requests), dim3(kThreads)}, stream, shape, arrays);
}

}  // namespace fdsd::cuda
