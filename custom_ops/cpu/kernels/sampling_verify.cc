#include "fdsd/sampling.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

Error CheckRequest(const VerifyDraftTokensParams& p, int32_t r) {
  const int32_t num_logits = p.cu_num_logits[r + 1] - p.cu_num_logits[r];
  const int32_t num_draft = p.cu_num_draft[r + 1] - p.cu_num_draft[r];
  if (num_logits != num_draft + 1 && (num_logits != 0 || num_draft != 0))
    return "cu_num_logits: expected drafts + 1 rows per request, or none and no drafts; got another number";
  // -1 marks a failed draw, which must never count as an accepted draft.
  for (int32_t d = p.cu_num_draft[r]; d < p.cu_num_draft[r + 1]; ++d)
    if (p.draft_token_ids[d] < 0) return "draft_token_ids: expected >= 0, got a negative id";
  return nullptr;
}

}  // namespace

Error VerifyDraftTokens(const VerifyDraftTokensParams& p) {
  if (!AreOffsets(p.cu_num_logits, p.num_requests))
    return "cu_num_logits: expected 0 and rising offsets, got a decrease";
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (Error error = CheckRequest(p, r)) return error;
  int32_t num_output = 0;
  p.cu_num_output[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t* sampled = p.sampled_token_ids + p.cu_num_logits[r];
    const int32_t* drafts = p.draft_token_ids + p.cu_num_draft[r];
    const int32_t num_draft = p.cu_num_draft[r + 1] - p.cu_num_draft[r];
    int32_t num_accepted = 0;
    while (num_accepted < num_draft && drafts[num_accepted] == sampled[num_accepted]) ++num_accepted;
    const bool has_logits = p.cu_num_logits[r + 1] > p.cu_num_logits[r];
    for (int32_t i = 0; has_logits && i <= num_accepted; ++i) p.token_ids[num_output++] = sampled[i];
    p.num_accepted[r] = num_accepted;
    p.cu_num_output[r + 1] = num_output;
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
