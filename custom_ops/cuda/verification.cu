#include "fdsd/sampling.h"
#include "ops.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

// A thread has a request.
constexpr int kThreads = 256;

struct VerifyShape {
  int32_t num_requests;
  AcceptPolicy policy;
  int32_t max_candidate_len;
  int32_t verify_window;
};

struct VerifyArrays {
  DevicePtr<const int32_t> sampled;
  DevicePtr<const int32_t> cu_num_logits;
  DevicePtr<const int32_t> drafts;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const int32_t> parent_rows;  // nullptr = each row follows the row before
  DevicePtr<const int32_t> candidates;
  DevicePtr<const int32_t> candidate_lens;
  DevicePtr<int32_t> token_ids;
  DevicePtr<int32_t> output_rows;
  DevicePtr<int32_t> cu_num_output;
  DevicePtr<int32_t> num_accepted;
  DevicePtr<int32_t> num_failed;
};

// One request's first row of logits, how many rows it has, its first draft and how many; draft i is that of row i + 1.
struct Drafted {
  int32_t row;
  int32_t num_rows;
  int32_t draft;
  int32_t num_drafts;
};

__device__ bool IsUsable(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x, int32_t i) {
  const int64_t first = static_cast<int64_t>(x.row + i) * shape.max_candidate_len;
  const int32_t draft = a.drafts[x.draft + i];
  for (int32_t c = 0; c < a.candidate_lens[x.row + i]; ++c)
    if (a.candidates[first + c] == draft) return true;
  return false;
}

// Whether draft i is second best and all of the window after it are best. Drafts that do not exist are not.
__device__ bool IsBackedByWindow(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x, int32_t i) {
  const int64_t first = static_cast<int64_t>(x.row + i) * shape.max_candidate_len;
  if (shape.max_candidate_len < 2 || a.candidates[first + 1] != a.drafts[x.draft + i]) return false;
  if (shape.verify_window > x.num_drafts - 1 - i) return false;
  for (int32_t w = 1; w <= shape.verify_window; ++w) {
    const int64_t best = first + static_cast<int64_t>(w) * shape.max_candidate_len;
    if (a.candidates[best] != a.drafts[x.draft + i + w]) return false;
  }
  return true;
}

__device__ int32_t CountPlausible(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x) {
  int32_t i = 0;
  while (i < x.num_drafts) {
    if (IsUsable(shape, a, x, i)) {
      ++i;
    } else if (IsBackedByWindow(shape, a, x, i)) {
      i += 1 + shape.verify_window;
    } else {
      break;
    }
  }
  return i;
}

// visit(row) for the rows from row 0 to the first child whose draft was drawn, as long as there is one.
template <typename Visit>
__device__ void FollowEqual(const VerifyArrays& a, const Drafted& x, const Visit& visit) {
  int32_t last = 0;
  visit(0);
  for (int32_t j = 1; j <= x.num_drafts; ++j) {
    const int32_t parent = a.parent_rows == nullptr ? j - 1 : static_cast<int32_t>(a.parent_rows[x.row + j]);
    if (parent != last || a.drafts[x.draft + j - 1] != a.sampled[x.row + parent]) continue;
    last = j;
    visit(j);
  }
}

// The equal drafts; without the last where its row has no token, as that draft is then emitted as the drawn one.
__device__ int32_t CountEqual(const VerifyArrays& a, const Drafted& x) {
  int32_t count = -1;
  int32_t last = 0;
  FollowEqual(a, x, [&](int32_t row) {
    ++count;
    last = row;
  });
  return count > 0 && a.sampled[x.row + last] < 0 ? count - 1 : count;
}

__device__ bool IsByEquality(const VerifyShape& shape) {
  return shape.policy == AcceptPolicy::kNormal && shape.max_candidate_len == 0;
}

__device__ int32_t CountAccepted(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x) {
  if (shape.policy == AcceptPolicy::kAcceptAll) return x.num_drafts;
  if (shape.policy == AcceptPolicy::kRejectAll) return 0;
  return shape.max_candidate_len > 0 ? CountPlausible(shape, a, x) : CountEqual(a, x);
}

// By equality, rows after the first have the token of an accepted draft.
__device__ bool HasFailed(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x, int32_t num_accepted) {
  if (IsByEquality(shape)) return a.sampled[x.row] < 0;
  for (int32_t i = 0; i <= num_accepted; ++i)
    if (a.sampled[x.row + i] < 0) return true;
  return false;
}

// Write the accepted drafts and the token after them from `begin` on.
__device__ void WriteOutput(const VerifyShape& shape, const VerifyArrays& a, const Drafted& x, int32_t num_accepted,
                            int32_t begin) {
  int32_t i = 0;
  const auto write = [&](int32_t row) {
    if (i > num_accepted) return;
    a.output_rows[begin + i] = x.row + row;
    a.token_ids[begin + i] =
        i < num_accepted && !IsByEquality(shape) ? a.drafts[x.draft + row] : a.sampled[x.row + row];
    ++i;
  };
  if (IsByEquality(shape)) {
    FollowEqual(a, x, write);
  } else {
    for (int32_t row = 0; row <= num_accepted; ++row) write(row);
  }
}

// One block: requests in order, kThreads at a time.
__global__ __launch_bounds__(kThreads) void VerifyDraftTokensKernel(VerifyShape shape, VerifyArrays a) {
  int32_t num_output = 0;
  int32_t num_failed = 0;
  if (threadIdx.x == 0) a.cu_num_output[0] = 0;
  for (int32_t first = 0; first < shape.num_requests; first += kThreads) {
    const int32_t r = first + static_cast<int32_t>(threadIdx.x);
    Drafted x{0, 0, 0, 0};
    if (r < shape.num_requests) {
      x.row = a.cu_num_logits[r];
      x.num_rows = a.cu_num_logits[r + 1] - x.row;
      x.draft = a.cu_num_draft[r];
      x.num_drafts = a.cu_num_draft[r + 1] - x.draft;
    }
    int32_t num_accepted = x.num_rows > 0 ? CountAccepted(shape, a, x) : 0;
    const bool has_failed = x.num_rows > 0 && HasFailed(shape, a, x, num_accepted);
    if (has_failed) num_accepted = 0;
    const int32_t num_own = x.num_rows > 0 && !has_failed ? num_accepted + 1 : 0;
    int32_t more_output;
    int32_t more_failed;
    const int32_t end = num_output + BlockRunningSum<kThreads>(num_own, &more_output);
    BlockRunningSum<kThreads>(has_failed ? 1 : 0, &more_failed);
    if (r < shape.num_requests) {
      a.num_accepted[r] = num_accepted;
      a.cu_num_output[r + 1] = end;
    }
    if (num_own > 0) WriteOutput(shape, a, x, num_accepted, end - num_own);
    num_output += more_output;
    num_failed += more_failed;
  }
  if (threadIdx.x == 0) a.num_failed[0] = num_failed;
}

}  // namespace

Error VerifyDraftTokens(const VerifyDraftTokensParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.accept_policy < AcceptPolicy::kNormal || p.accept_policy > AcceptPolicy::kRejectAll)
    return "accept_policy: expected 0 (normal), 1 (accept all) or 2 (reject all), got another";
  if (p.max_candidate_len < 0) return "max_candidate_len: expected >= 0, got a negative number";
  if (p.verify_window < 0) return "verify_window: expected >= 0, got a negative number";
  if (p.parent_rows != nullptr && (p.accept_policy != AcceptPolicy::kNormal || p.max_candidate_len > 0))
    return "parent_rows: expected none unless drafts are verified by equality, got some";
  const VerifyShape shape{p.num_requests, p.accept_policy, p.max_candidate_len, p.verify_window};
  const VerifyArrays arrays{DevicePtr<const int32_t>(p.sampled_token_ids),
                            DevicePtr<const int32_t>(p.cu_num_logits),
                            DevicePtr<const int32_t>(p.draft_token_ids),
                            DevicePtr<const int32_t>(p.cu_num_draft),
                            DevicePtr<const int32_t>(p.parent_rows),
                            DevicePtr<const int32_t>(p.candidate_token_ids),
                            DevicePtr<const int32_t>(p.candidate_lens),
                            DevicePtr<int32_t>(p.token_ids),
                            DevicePtr<int32_t>(p.output_rows),
                            DevicePtr<int32_t>(p.cu_num_output),
                            DevicePtr<int32_t>(p.num_accepted),
                            DevicePtr<int32_t>(p.num_failed)};
  return Launch<VerifyDraftTokensKernel>(LaunchShape{dim3(1), dim3(kThreads)}, stream, shape, arrays);
}

}  // namespace fdsd::cuda
