#include "logits_rules.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

Error CheckAll(const ProcessLogitsParams& p) {
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (Error error = CheckDraftedRows(p.drafted, p.num_requests, p.num_rows)) return error;
  if (!AreBelow(p.num_rows, p.rows, p.num_processed)) return "rows: expected rows of logits, got one outside";
  if (Error error = CheckTableRows(p.rules, p.num_requests)) return error;
  return CheckRules(p.rules, p.drafted, p.num_requests, p.num_rows, p.vocab_size);
}

}  // namespace

Error ProcessLogits(const ProcessLogitsParams& p) {
  if (Error error = CheckAll(p)) return error;
  int32_t* request_of = ScratchArray<int32_t>(Scratch::kRows, p.num_rows);
  for (int32_t r = 0; r < p.num_requests; ++r)
    std::fill(request_of + p.drafted.cu_num_logits[r], request_of + p.drafted.cu_num_logits[r + 1], r);
  ForEach(p.num_processed, [&](int64_t i) {
    const RuledRow row = RuledRowOf(p.rules, p.drafted, p.logits, p.vocab_size, p.rows[i], request_of[p.rows[i]]);
    RowRules(p.rules, row, p.vocab_size).Apply(p.y + i * p.vocab_size);
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
