#include "ngram_index.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "draft_evidence.h"
#include "for_each_row.h"
#include "random_multiplier.h"

namespace fdsd {
namespace {

// Tokens indexed at once: one table after another, so that each stays in the cache for a while.
constexpr int32_t kMaxIndexed = 256;

}  // namespace

NgramIndex::NgramIndex(int32_t num_table_rows, const NgramRule& rule)
    : rule_(rule), multiplier_(RandomMultiplier()), rows_(static_cast<size_t>(num_table_rows)) {}

Error NgramIndex::CheckTableRows(const int32_t* table_rows, int32_t count) const {
  for (int32_t i = 0; i < count; ++i)
    if (table_rows[i] < 0 || static_cast<size_t>(table_rows[i]) >= rows_.size())
      return "table_rows: expected 0 .. max_num_seqs - 1, got one outside";
  return nullptr;
}

Error NgramIndex::Begin(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    Row fresh;
    fresh.in_use = true;
    for (int32_t n = rule_.min_n; n <= rule_.max_n; ++n) fresh.tables.emplace_back(n, multiplier_, rule_.keeps_earlier);
    rows_[static_cast<size_t>(table_rows[i])] = std::move(fresh);
  }
  return nullptr;
}

Error NgramIndex::Forget(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) rows_[static_cast<size_t>(table_rows[i])] = Row{};
  return nullptr;
}

Error NgramIndex::CheckRow(const DraftProposeParams& p, int32_t r) const {
  if (p.table_rows[r] < 0 || p.table_rows[r] >= p.num_table_rows)
    return "table_rows: expected rows of token_table, got one outside";
  const Row& table_row = rows_[static_cast<size_t>(p.table_rows[r])];
  if (!table_row.in_use) return "table_rows: expected table rows that were begun, got another";
  if (p.num_tokens[r] < table_row.num_tokens)
    return "num_tokens: expected no fewer than in the table row's last step, got "
           "fewer";
  if (p.num_tokens[r] > p.max_tokens_per_row) return "num_tokens: expected at most a row of token_table, got more";
  if (p.max_draft_len[r] < 0) return "max_draft_len: expected >= 0, got a negative length";
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[r + 1] < p.cu_num_prefix[r])
    return "cu_num_prefix: expected rising offsets, got a decrease";
  return nullptr;
}

Error NgramIndex::CheckRows(const DraftProposeParams& p) const {
  if (Error error = CheckTableRows(p.table_rows, p.num_rows)) return error;
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[0] != 0)
    return "cu_num_prefix: expected to start at 0, got another";
  int64_t num_allowed = 0;
  std::vector<bool> is_row(rows_.size());
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (is_row[static_cast<size_t>(p.table_rows[r])]) return "table_rows: expected none twice, got one that is";
    is_row[static_cast<size_t>(p.table_rows[r])] = true;
    if (Error error = CheckRow(p, r)) return error;
    num_allowed += p.max_draft_len[r];
  }
  if (num_allowed > p.max_num_drafts) return "max_num_drafts: expected the sum of max_draft_len, got less";
  return nullptr;
}

void NgramIndex::Index(const int32_t* text, int32_t end, Row* table_row) const {
  while (table_row->num_indexed < end) {
    const int32_t last = std::min(end, table_row->num_indexed + kMaxIndexed);
    std::array<NgramMatch, kMaxIndexed> before{};
    for (NgramTable& table : table_row->tables) table.Extend(text, last, before.data());
    const auto at = [&](int64_t i) { return text[i]; };
    for (int32_t e = table_row->num_indexed + 1; rule_.follows_copies && e <= last; ++e)
      table_row->copy.Read(at, e, before[last - e], rule_.max_n);
    table_row->num_indexed = last;
  }
}

int32_t NgramIndex::FindEnd(const NgramTable& table, const Text& text, const int32_t* text_end, int64_t end) {
  const int32_t n = table.n();
  const int32_t* ngram = text_end - n;
  // The n-gram that ends the committed tokens is not indexed yet: where they are all, it is the one looked for.
  const bool is_last = end > text.num_committed && n <= text.num_committed &&
                       std::equal(ngram, ngram + n, text.committed + text.num_committed - n);
  return is_last ? text.num_committed : table.Find(text.committed, ngram);
}

NgramMatch NgramIndex::LookUp(const Row& table_row, const Text& text, int64_t end) const {
  std::vector<int32_t> last_tokens;
  const int32_t* text_end = text.EndOf(end, std::min<int64_t>(rule_.max_n, end), &last_tokens);
  // An n-gram that occurred before contains an (n-1)-gram that did: the search ends at the first length not found.
  NgramMatch match;
  for (const NgramTable& table : table_row.tables) {
    const int32_t n = table.n();
    if (n > end) break;
    const int32_t found = FindEnd(table, text, text_end, end);
    if (found == 0) break;
    match = {n, found, n};
  }
  return match;
}

NgramMatch NgramIndex::Source(const Row& table_row, const Text& text) const {
  if (!rule_.follows_copies) return LookUp(table_row, text, text.size());
  const auto at = [&](int64_t i) { return text.at(i, nullptr); };
  NgramCopy copy = table_row.copy;
  NgramMatch match;
  for (int64_t end = table_row.num_indexed + 1; end <= text.size(); ++end) {
    match = LookUp(table_row, text, end);
    copy.Read(at, end, match, rule_.max_n);
  }
  return copy.Choose(match);
}

int32_t NgramIndex::ProposeRow(const DraftProposeParams& p, int32_t r, NgramMatch* source) {
  Row& table_row = rows_[static_cast<size_t>(p.table_rows[r])];
  const Text text(p, r);
  table_row.num_tokens = text.num_committed;
  // The n-gram that ends the text stays out: it would hide where it occurred before.
  Index(text.committed, text.num_committed - 1, &table_row);
  *source = p.max_draft_len[r] > 0 ? Source(table_row, text) : NgramMatch{};
  if (p.draft_parents != nullptr) return BranchRow(p, r, text, *source);
  const int32_t num_drafts = MaxDrafts(rule_.max_factor, source->length, p.max_draft_len[r]);
  int32_t* drafts = p.draft_token_ids + begins_[static_cast<size_t>(r)];
  // source->end < text.size(): a draft is copied from the text, or from a draft before it.
  for (int32_t i = 0; i < num_drafts; ++i) drafts[i] = text.at(static_cast<int64_t>(source->end) + i, drafts);
  return num_drafts;
}

Error NgramIndex::Propose(const DraftProposeParams& p) {
  if (Error error = CheckRows(p)) return error;
  if (p.draft_parents != nullptr && !rule_.keeps_earlier)
    return "draft_parents: expected none of an index without earlier occurrences, got some";
  // Each row first drafts into its own part, of max_draft_len tokens. Then the drafts are moved together.
  begins_.resize(static_cast<size_t>(p.num_rows) + 1);
  begins_[0] = 0;
  sources_.resize(static_cast<size_t>(p.num_rows));
  for (int32_t r = 0; r < p.num_rows; ++r) begins_[r + 1] = begins_[r] + p.max_draft_len[r];
  ForEachRow(p.num_rows, [&](int32_t r) { p.cu_num_draft[r + 1] = ProposeRow(p, r, &sources_[r]); });
  p.cu_num_draft[0] = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    const int32_t num_drafts = p.cu_num_draft[r + 1], to = p.cu_num_draft[r];
    std::copy_n(p.draft_token_ids + begins_[r], num_drafts, p.draft_token_ids + to);
    p.cu_num_draft[r + 1] = to + num_drafts;
    if (p.evidence != nullptr)
      DraftEvidence{sources_[r].length, sources_[r].recent, 0}.Write(p.evidence + r * DraftEvidence::kNumFields);
    if (p.draft_parents != nullptr) {
      std::copy_n(p.draft_parents + begins_[r], num_drafts, p.draft_parents + to);
      if (p.draft_prob != nullptr) std::copy_n(p.draft_prob + begins_[r], num_drafts, p.draft_prob + to);
    } else if (p.draft_prob != nullptr) {
      std::fill_n(p.draft_prob + to, num_drafts, DraftEvidence::kNotCounted);
    }
  }
  return nullptr;
}

Error NgramIndex::CheckIntegrity(const int32_t* token_table, int32_t num_table_rows, int32_t max_tokens_per_row) const {
  for (size_t s = 0; s < rows_.size(); ++s) {
    const Row& table_row = rows_[s];
    if (!table_row.in_use && !table_row.tables.empty())
      return "tables: expected none where the table row is not in use, got some";
    if (table_row.in_use && static_cast<int32_t>(s) >= num_table_rows)
      return "token_table: expected every table row in use, got fewer";
    if (table_row.num_tokens > max_tokens_per_row)
      return "token_table: expected every token of a table row, got fewer columns";
    const int32_t* text = token_table + static_cast<int64_t>(s) * max_tokens_per_row;
    for (const NgramTable& table : table_row.tables)
      if (Error error = table.CheckIntegrity(text, table_row.num_tokens - 1)) return error;
    const int32_t source = table_row.copy.source(), recent = table_row.copy.recent();
    if (source >= std::max(1, table_row.num_indexed) || recent > source)
      return "copy: expected a source before the last indexed token, got "
             "another";
    if (!std::equal(text + source - recent, text + source, text + table_row.num_indexed - recent))
      return "copy: expected the last indexed tokens before its source, got "
             "others";
  }
  return nullptr;
}

int64_t NgramIndex::num_bytes() const {
  int64_t total = 0;
  for (const Row& table_row : rows_)
    for (const NgramTable& table : table_row.tables) total += table.num_bytes();
  return total;
}

CallStatus NgramCreate(const NgramCreateParams& p) {
  if (p.num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  if (p.min_n < 1 || p.max_n < p.min_n) return "min_n: expected 1 <= min_n <= max_n, got another order";
  if (!(p.max_factor > 0) || std::isinf(p.max_factor)) return "max_factor: expected a finite number > 0, got another";
  *p.drafter =
      new NgramIndex(p.num_table_rows, {p.min_n, p.max_n, p.max_factor, p.follows_copies != 0, p.keeps_earlier != 0});
  return nullptr;
}

CallStatus NgramBegin(const DraftTableRowsParams& p) {
  return static_cast<NgramIndex*>(p.drafter)->Begin(p.table_rows, p.count);
}

CallStatus NgramForget(const DraftTableRowsParams& p) {
  return static_cast<NgramIndex*>(p.drafter)->Forget(p.table_rows, p.count);
}

CallStatus NgramPropose(const DraftProposeParams& p) { return static_cast<NgramIndex*>(p.drafter)->Propose(p); }

CallStatus NgramCheckIntegrity(const NgramCheckParams& p) {
  return p.index->CheckIntegrity(p.token_table, p.num_table_rows, p.max_tokens_per_row);
}

}  // namespace fdsd
