#include "fdsd/sampling.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// One request's logits rows, counted from 0, and its drafts: draft i is that of row i + 1.
struct Drafted {
  const int32_t* sampled;
  const int32_t* drafts;
  const int32_t* parents;     // of each row; nullptr = the row before
  const int32_t* candidates;  // [rows, C]
  const int32_t* candidate_lens;
  int32_t num_rows;
  int32_t num_drafts;
};

Drafted DraftedOf(const VerifyDraftTokensParams& p, int32_t r) {
  const int32_t row = p.cu_num_logits[r];
  const int32_t draft = p.cu_num_draft[r];
  return Drafted{
      p.sampled_token_ids + row,
      p.draft_token_ids + draft,
      p.parent_rows != nullptr ? p.parent_rows + row : nullptr,
      p.max_candidate_len > 0 ? p.candidate_token_ids + static_cast<int64_t>(row) * p.max_candidate_len : nullptr,
      p.max_candidate_len > 0 ? p.candidate_lens + row : nullptr,
      p.cu_num_logits[r + 1] - row,
      p.cu_num_draft[r + 1] - draft};
}

bool IsUsable(const VerifyDraftTokensParams& p, const Drafted& x, int32_t i) {
  const int32_t* candidates = x.candidates + static_cast<int64_t>(i) * p.max_candidate_len;
  for (int32_t c = 0; c < x.candidate_lens[i]; ++c)
    if (candidates[c] == x.drafts[i]) return true;
  return false;
}

// Whether draft i is second best and all of the window after it are best. Drafts that do not exist are not.
bool IsBackedByWindow(const VerifyDraftTokensParams& p, const Drafted& x, int32_t i) {
  const int32_t* candidates = x.candidates + static_cast<int64_t>(i) * p.max_candidate_len;
  if (p.max_candidate_len < 2 || candidates[1] != x.drafts[i]) return false;
  if (p.verify_window > x.num_drafts - 1 - i) return false;
  for (int32_t w = 1; w <= p.verify_window; ++w)
    if (candidates[static_cast<int64_t>(w) * p.max_candidate_len] != x.drafts[i + w]) return false;
  return true;
}

int32_t CountPlausible(const VerifyDraftTokensParams& p, const Drafted& x) {
  int32_t i = 0;
  while (i < x.num_drafts) {
    if (IsUsable(p, x, i)) {
      ++i;
    } else if (IsBackedByWindow(p, x, i)) {
      i += 1 + p.verify_window;
    } else {
      break;
    }
  }
  return i;
}

// Walk from row 0 to the first child whose draft was drawn, as long as there is one, and write the rows of the path.
// Returns the drafts on it. Where the last row has no token, its draft is left to be emitted as one that was drawn:
// what plain decoding emits before it fails.
int32_t FollowEqual(const Drafted& x, int32_t* rows) {
  int32_t count = 0;
  rows[0] = 0;
  for (int32_t j = 1; j <= x.num_drafts; ++j) {
    const int32_t parent = x.parents == nullptr ? j - 1 : x.parents[j];
    if (parent == rows[count] && x.drafts[j - 1] == x.sampled[parent]) rows[++count] = j;
  }
  return count > 0 && x.sampled[rows[count]] < 0 ? count - 1 : count;
}

// Write the rows whose tokens come out, if the request does not fail; returns the drafts among them.
int32_t Accept(const VerifyDraftTokensParams& p, const Drafted& x, int32_t* rows) {
  for (int32_t j = 0; j < x.num_rows; ++j) rows[j] = j;
  switch (p.accept_policy) {
    case AcceptPolicy::kAcceptAll:
      return x.num_drafts;
    case AcceptPolicy::kRejectAll:
      return 0;
    case AcceptPolicy::kNormal:
      break;
  }
  return p.max_candidate_len > 0 ? CountPlausible(p, x) : FollowEqual(x, rows);
}

bool HasFailed(const Drafted& x, const int32_t* rows, int32_t num_accepted) {
  for (int32_t i = 0; i <= num_accepted; ++i)
    if (x.sampled[rows[i]] < 0) return true;
  return false;
}

Error CheckRequest(const VerifyDraftTokensParams& p, int32_t r) {
  const int32_t num_logits = p.cu_num_logits[r + 1] - p.cu_num_logits[r];
  const int32_t num_draft = p.cu_num_draft[r + 1] - p.cu_num_draft[r];
  if (num_logits != num_draft + 1 && (num_logits != 0 || num_draft != 0))
    return "cu_num_logits: expected drafts + 1 rows per request, or none and no drafts; got another number";
  // -1 marks a failed draw or a missing candidate, which must never equal a draft.
  for (int32_t d = p.cu_num_draft[r]; d < p.cu_num_draft[r + 1]; ++d)
    if (p.draft_token_ids[d] < 0) return "draft_token_ids: expected >= 0, got a negative id";
  return nullptr;
}

Error CheckCandidates(const VerifyDraftTokensParams& p) {
  if (p.max_candidate_len < 0) return "max_candidate_len: expected >= 0, got a negative number";
  const bool has_candidates = p.candidate_token_ids != nullptr || p.candidate_lens != nullptr;
  if (p.max_candidate_len == 0)
    return has_candidates ? "max_candidate_len: expected >= 1 with candidates, got 0" : nullptr;
  const bool has_all = p.candidate_token_ids != nullptr && p.candidate_lens != nullptr;
  if (p.cu_num_logits[p.num_requests] > 0 && !has_all)
    return "candidate_token_ids: expected candidates and their lengths where max_candidate_len says so, got none";
  if (p.verify_window < 0) return "verify_window: expected >= 0, got a negative number";
  for (int32_t row = 0; row < p.cu_num_logits[p.num_requests]; ++row)
    if (p.candidate_lens[row] < 0 || p.candidate_lens[row] > p.max_candidate_len)
      return "candidate_lens: expected 0..max_candidate_len, got a number outside";
  return nullptr;
}

Error CheckAll(const VerifyDraftTokensParams& p) {
  if (!AreOffsets(p.cu_num_logits, p.num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (Error error = CheckRequest(p, r)) return error;
  if (p.accept_policy < AcceptPolicy::kNormal || p.accept_policy > AcceptPolicy::kRejectAll)
    return "accept_policy: expected 0 (normal), 1 (accept all) or 2 (reject all), got another";
  if (p.parent_rows != nullptr) {
    if (p.accept_policy != AcceptPolicy::kNormal || p.max_candidate_len > 0)
      return "parent_rows: expected none unless drafts are verified by equality, got some";
    if (Error error = CheckParentRows(p.parent_rows, p.cu_num_logits, p.num_requests)) return error;
  }
  return CheckCandidates(p);
}

}  // namespace

Error VerifyDraftTokens(const VerifyDraftTokensParams& p) {
  if (Error error = CheckAll(p)) return error;
  int32_t num_output = 0;
  p.cu_num_output[0] = 0;
  *p.num_failed = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const Drafted x = DraftedOf(p, r);
    p.num_accepted[r] = 0;
    if (x.num_rows > 0) {
      int32_t* rows = p.output_rows + num_output;
      const int32_t num_accepted = Accept(p, x, rows);
      if (HasFailed(x, rows, num_accepted)) {
        ++*p.num_failed;
      } else {
        p.num_accepted[r] = num_accepted;
        for (int32_t i = 0; i <= num_accepted; ++i, ++num_output) {
          p.token_ids[num_output] = i < num_accepted ? x.drafts[rows[i + 1] - 1] : x.sampled[rows[i]];
          rows[i] += p.cu_num_logits[r];
        }
      }
    }
    p.cu_num_output[r + 1] = num_output;
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
