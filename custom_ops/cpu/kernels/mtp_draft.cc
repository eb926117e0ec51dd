#include "fdsd/mtp.h"
#include "logits_row.h"
#include "offsets.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

int32_t NumDraft(const MtpPostprocessParams& p, int32_t r) { return p.cu_num_draft[r + 1] - p.cu_num_draft[r]; }

Error CheckNext(const MtpPostprocessParams& p, int32_t r) {
  if (p.table_rows[r] < 0 || p.table_rows[r] >= p.blocks.num_table_rows)
    return "table_rows: expected rows of block_table, got one outside";
  if (p.num_committed[r] < 0) return "num_committed: expected >= 0, got a negative count";
  const int64_t block = (static_cast<int64_t>(p.num_committed[r]) + p.step) / p.blocks.block_size;
  if (block >= p.blocks.max_blocks ||
      p.blocks.block_table[static_cast<int64_t>(p.table_rows[r]) * p.blocks.max_blocks + block] < 0)
    return "block_table: expected a block for the next slot, got none";
  return nullptr;
}

Error CheckPostprocess(const MtpPostprocessParams& p) {
  if (p.blocks.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.vocab_size <= 0) return "vocab_size: expected a positive number, got less";
  if (p.step < 0) return "step: expected >= 0, got a negative number";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (!AreOffsets(p.cu_num_draft, p.num_requests)) return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (p.cu_num_draft[p.num_requests] > p.num_drafts) return "cu_num_draft: expected at most num_drafts last, got more";
  int32_t num_rows = 0;
  int32_t num_next = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    num_rows += NumDraft(p, r) > p.step;
    if (NumDraft(p, r) <= p.step + 1) continue;
    ++num_next;
    if (Error error = CheckNext(p, r)) return error;
  }
  if (num_rows != p.num_rows) return "logits: expected a row for every request that drafts, got another number";
  if (num_next != p.num_next) return "num_next: expected requests with more drafts to come, got another number";
  return nullptr;
}

// The row of request r in the next pass.
void WriteNext(const MtpPostprocessParams& p, int32_t r, int32_t row, int32_t draft, int32_t b) {
  const int32_t slot = p.num_committed[r] + p.step;
  const int64_t block =
      p.blocks.block_table[static_cast<int64_t>(p.table_rows[r]) * p.blocks.max_blocks + slot / p.blocks.block_size];
  p.out.input_ids[b] = std::max(draft, 0);
  p.out.positions[b] = slot;
  p.out.slot_mapping[b] = block * p.blocks.block_size + slot % p.blocks.block_size;
  std::memcpy(static_cast<char*>(p.out.hidden) + b * p.row_bytes,
              static_cast<const char*>(p.hidden) + row * p.row_bytes, static_cast<size_t>(p.row_bytes));
}

}  // namespace

Error MtpPostprocess(const MtpPostprocessParams& p) {
  if (Error error = CheckPostprocess(p)) return error;
  const LogitsScan scan(p.logits, p.num_rows, p.vocab_size);
  int32_t row = 0;
  int32_t b = 0;
  p.out.query_start_loc[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    p.out.seq_lens[r] = 0;
    if (NumDraft(p, r) > p.step) {
      const Chunk best = scan.Whole(row);
      const int32_t draft = best.is_valid && best.max > -kInf ? best.argmax : -1;
      p.draft_token_ids[p.cu_num_draft[r] + p.step] = draft;
      if (NumDraft(p, r) > p.step + 1) {
        WriteNext(p, r, row, draft, b++);
        p.out.seq_lens[r] = p.num_committed[r] + p.step + 1;
      }
      ++row;
    }
    p.out.query_start_loc[r + 1] = b;
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
