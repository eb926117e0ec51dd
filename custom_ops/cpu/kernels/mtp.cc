#include "fdsd/mtp.h"

#include <algorithm>
#include <cstring>

#include "offsets.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Rows copied per task: small rows would otherwise cost more to hand out than to copy.
constexpr int64_t kCopyBytesPerTask = 1 << 18;

const char* RowAt(const void* rows, int64_t index, int64_t row_bytes) {
  return static_cast<const char*>(rows) + index * row_bytes;
}
char* RowAt(void* rows, int64_t index, int64_t row_bytes) { return static_cast<char*>(rows) + index * row_bytes; }

// y[i] = *sources[i], a null source being zeros.
void CopyRows(const char* const* sources, int32_t num_rows, int64_t row_bytes, void* y) {
  const int64_t rows_per_task = std::max<int64_t>(1, kCopyBytesPerTask / std::max<int64_t>(1, row_bytes));
  ParallelFor((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = std::min<int64_t>(num_rows, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) {
      char* row = RowAt(y, i, row_bytes);
      if (sources[i] == nullptr) {
        std::memset(row, 0, static_cast<size_t>(row_bytes));
      } else {
        std::memcpy(row, sources[i], static_cast<size_t>(row_bytes));
      }
    }
  });
}

// One request of a pass.
class MtpRow {
 public:
  MtpRow(const MtpPreprocessParams& p, int32_t r)
      : p_(p),
        r_(r),
        tokens_(p.tokens.token_table + static_cast<int64_t>(p.requests.table_rows[r]) * p.tokens.max_tokens_per_row),
        blocks_(p.blocks.block_table + static_cast<int64_t>(p.requests.table_rows[r]) * p.blocks.max_blocks) {}

  int32_t begin() const { return p_.requests.begin[r_]; }
  int32_t num_draft() const { return p_.requests.cu_num_draft[r_ + 1] - p_.requests.cu_num_draft[r_]; }
  // Past the slots that combine a token with a hidden row, and past those of the block.
  int32_t block_begin() const { return p_.requests.end[r_]; }
  int32_t end() const {
    return block_begin() + (has_blocks() && num_draft() > 0 ? num_draft() + p_.draft_block.more_rows : 0);
  }
  int32_t num_draft_rows() const { return has_blocks() ? num_draft() : num_draft() > p_.source; }

  // A draft that could not be made is run as token 0.
  int32_t TokenAt(int32_t slot) const {
    const int32_t place = slot - p_.draft_block.token_shift;
    const int32_t committed = p_.requests.num_committed[r_];
    if (place < committed) return tokens_[place];
    if (has_blocks()) return p_.draft_block.mask_token;
    return std::max(p_.requests.draft_token_ids[p_.requests.cu_num_draft[r_] + place - committed], 0);
  }

  int64_t KvSlot(int32_t slot) const {
    return static_cast<int64_t>(blocks_[slot / p_.blocks.block_size]) * p_.blocks.block_size +
           slot % p_.blocks.block_size;
  }

  // The hidden row that a slot combines with its token, nullptr for zeros.
  const char* HiddenOf(int32_t slot) const {
    if (slot >= block_begin()) return static_cast<const char*>(p_.draft_block.mask_hidden);
    const int32_t position = slot - 1;
    if (position < p_.source) return nullptr;
    if (position >= p_.requests.hidden_begin[r_]) return CurrentHidden(position);
    if (EndsBlock(position)) return RowAt(p_.rows.block_hidden, Block(position), p_.rows.row_bytes);
    const int64_t first = static_cast<int64_t>(p_.requests.table_rows[r_]) * p_.rows.num_kept;
    return RowAt(p_.rows.request_hidden, first + position % p_.rows.num_kept, p_.rows.row_bytes);
  }

  Error Check() const {
    if (Error error = CheckSlots()) return error;
    return CheckHidden();
  }

 private:
  bool has_blocks() const { return p_.draft_block.mask_token >= 0; }
  int32_t Block(int32_t position) const { return blocks_[position / p_.blocks.block_size]; }
  bool EndsBlock(int32_t position) const { return (position + 1) % p_.blocks.block_size == 0; }
  const char* CurrentHidden(int32_t position) const {
    return RowAt(p_.rows.hidden, p_.requests.cu_hidden[r_] + position - p_.requests.hidden_begin[r_],
                 p_.rows.row_bytes);
  }

  Error CheckSlots() const {
    const int32_t committed = p_.requests.num_committed[r_];
    if (begin() < 0 || (begin() == 0 && end() > 0 && (p_.rows.row_bytes > 0 || p_.draft_block.token_shift > 0)))
      return "begin: expected >= 1, as slot 0 has no hidden row before it, or >= 0 where no rows are read; got less";
    if (block_begin() < begin()) return "end: expected >= begin, got less";
    if (committed < 0 || committed > p_.tokens.max_tokens_per_row)
      return "num_committed: expected at most a row of token_table, got another number";
    const int32_t num_known = has_blocks() ? 0 : std::min(p_.source, num_draft());
    if (block_begin() > begin() && block_begin() > static_cast<int64_t>(committed) + num_known)
      return "end: expected committed tokens and known drafts only, got more";
    return CheckBlocks(begin() == end() ? 0 : end());
  }

  Error CheckHidden() const {
    const int32_t first = p_.requests.hidden_begin[r_];
    const int64_t num_rows = p_.requests.cu_hidden[r_ + 1] - p_.requests.cu_hidden[r_];
    if (first < 0) return "hidden_begin: expected a position, got a negative one";
    if (begin() == block_begin() || p_.rows.row_bytes == 0) return nullptr;
    const bool are_kept = p_.rows.num_blocks > 0;
    if (begin() <= first - (are_kept ? p_.rows.num_kept : 0) && !(are_kept && EndsBlock(begin() - 1)))
      return "begin: expected slots whose hidden rows are kept, got an earlier one";
    if (block_begin() - 1 > first + num_rows) return "hidden: expected a row for every slot, got too few";
    return nullptr;
  }

  Error CheckBlocks(int32_t num_tokens) const {
    const int64_t num_blocks = (static_cast<int64_t>(num_tokens) + p_.blocks.block_size - 1) / p_.blocks.block_size;
    if (num_blocks > p_.blocks.max_blocks) return "block_table: expected blocks for every slot, got too few columns";
    for (int64_t i = 0; i < num_blocks; ++i)
      if (blocks_[i] < 0 || (p_.rows.num_blocks > 0 && blocks_[i] >= p_.rows.num_blocks))
        return "block_table: expected a block for every slot, got an id outside";
    return nullptr;
  }

  const MtpPreprocessParams& p_;
  const int32_t r_;
  const int32_t* tokens_;
  const int32_t* blocks_;
};

Error CheckPreprocess(const MtpPreprocessParams& p) {
  if (p.blocks.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.source < 0) return "source: expected >= 0, got a negative layer";
  if (p.rows.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (p.rows.num_kept < 1) return "num_kept: expected at least 1, got less";
  if (p.draft_block.more_rows < -1) return "more_rows: expected at least -1, got less";
  if (p.draft_block.token_shift < 0 || p.draft_block.token_shift > 1)
    return "token_shift: expected 0 or 1, got another number";
  if (p.draft_block.mask_token >= 0 && p.draft_block.mask_hidden == nullptr && p.rows.row_bytes > 0)
    return "mask_hidden: expected a row where blocks read one, got none";
  if (!AreRising(p.requests.cu_hidden, p.num_requests)) return "cu_hidden: expected rising offsets, got a decrease";
  if (!AreOffsets(p.requests.cu_num_draft, p.num_requests))
    return "cu_num_draft: expected 0 and rising offsets, got a decrease";
  if (p.requests.cu_num_draft[p.num_requests] > p.requests.num_drafts)
    return "cu_num_draft: expected at most num_drafts last, got more";
  if (p.requests.cu_hidden[p.num_requests] > p.rows.num_hidden)
    return "cu_hidden: expected at most the rows of hidden, got more";
  int64_t num_tokens = 0;
  int64_t num_draft_rows = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (p.requests.table_rows[r] < 0 || p.requests.table_rows[r] >= p.blocks.num_table_rows)
      return "table_rows: expected rows of token_table, got one outside";
    const MtpRow row(p, r);
    if (Error error = row.Check()) return error;
    num_tokens += row.end() - row.begin();
    num_draft_rows += row.num_draft_rows();
    if (row.num_draft_rows() > row.end() - row.begin())
      return "cu_num_draft: expected drafts only where a slot is computed, got some elsewhere";
  }
  if (num_tokens != p.num_tokens)
    return "num_tokens: expected the sum of end - begin and the rows of blocks, got another number";
  if (num_draft_rows != p.num_draft_rows)
    return "num_draft_rows: expected requests that draft, or drafts of blocks, got another number";
  return nullptr;
}

}  // namespace

Error MtpPreprocess(const MtpPreprocessParams& p) {
  if (Error error = CheckPreprocess(p)) return error;
  const char** sources = ScratchArray<const char*>(Scratch::kOp, p.num_tokens);
  int32_t t = 0;
  int32_t a = 0;
  p.out.query_start_loc[0] = 0;
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const MtpRow row(p, r);
    for (int32_t slot = row.begin(); slot < row.end(); ++slot, ++t) {
      p.out.input_ids[t] = row.TokenAt(slot);
      p.out.positions[t] = slot;
      p.out.slot_mapping[t] = row.KvSlot(slot);
      sources[t] = row.HiddenOf(slot);
    }
    for (int32_t before = row.num_draft_rows(); before > 0; --before) p.out.draft_rows[a++] = t - before;
    p.out.seq_lens[r] = row.end();
    p.out.query_start_loc[r + 1] = t;
  }
  CopyRows(sources, p.num_tokens, p.rows.row_bytes, p.out.hidden);
  return nullptr;
}

namespace {

Error CheckKeep(const KeepHiddenParams& p) {
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.num_kept < 1) return "num_kept: expected at least 1, got less";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (!AreOffsets(p.query_start_loc, p.num_requests))
    return "query_start_loc: expected 0 and rising offsets, got a decrease";
  if (p.query_start_loc[p.num_requests] > p.num_tokens)
    return "query_start_loc: expected at most the rows of hidden, got more";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t count = p.query_start_loc[r + 1] - p.query_start_loc[r];
    if (count == 0) continue;
    if (p.table_rows[r] < 0 || p.table_rows[r] >= p.num_table_rows)
      return "table_rows: expected rows of block_table, got one outside";
    if (p.seq_lens[r] < count) return "seq_lens: expected at least the request's rows, got less";
    if ((static_cast<int64_t>(p.seq_lens[r]) + p.block_size - 1) / p.block_size > p.max_blocks)
      return "block_table: expected blocks for every position, got too few columns";
    const int32_t* blocks = p.block_table + static_cast<int64_t>(p.table_rows[r]) * p.max_blocks;
    for (int32_t b = (p.seq_lens[r] - count) / p.block_size; b < p.seq_lens[r] / p.block_size; ++b)
      if (blocks[b] < 0 || blocks[b] >= p.num_blocks)
        return "block_table: expected a block for every position, got an id outside";
  }
  return nullptr;
}

}  // namespace

Error KeepHidden(const KeepHiddenParams& p) {
  if (Error error = CheckKeep(p)) return error;
  const auto size = static_cast<size_t>(p.row_bytes);
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int32_t end = p.seq_lens[r];
    const int32_t begin = end - (p.query_start_loc[r + 1] - p.query_start_loc[r]);
    const int64_t first_kept = static_cast<int64_t>(p.table_rows[r]) * p.num_kept;
    const int32_t* blocks = p.block_table + static_cast<int64_t>(p.table_rows[r]) * p.max_blocks;
    const auto row_of = [&](int32_t position) {
      return RowAt(p.hidden, p.query_start_loc[r] + position - begin, p.row_bytes);
    };
    for (int32_t position = std::max(begin, end - p.num_kept); position < end; ++position)
      std::memcpy(RowAt(p.request_hidden, first_kept + position % p.num_kept, p.row_bytes), row_of(position), size);
    for (int32_t block = begin / p.block_size; block < end / p.block_size; ++block)
      std::memcpy(RowAt(p.block_hidden, blocks[block], p.row_bytes), row_of((block + 1) * p.block_size - 1), size);
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
