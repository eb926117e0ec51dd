#include "ngram_index.h"

#include <algorithm>
#include <bit>

#include "random_multiplier.h"

namespace fdsd {
namespace {

constexpr size_t kMinCells = 16;

bool IsSame(const int32_t* a, const int32_t* b, int32_t n) { return std::equal(a, a + n, b); }

}  // namespace

NgramTable::NgramTable(int32_t n, uint64_t multiplier) : n_(n), multiplier_(multiplier), leaving_factor_(1) {
  for (int32_t i = 0; i < n; ++i) leaving_factor_ *= multiplier;
}

// sum of ngram[i] * multiplier^(n - i), modulo 2^64
uint64_t NgramTable::Hash(const int32_t* ngram) const {
  uint64_t hash = 0;
  for (int32_t i = 0; i < n_; ++i) hash = (hash + static_cast<uint32_t>(ngram[i])) * multiplier_;
  return hash;
}

uint64_t NgramTable::Roll(uint64_t hash, int32_t leaving, int32_t entering) const {
  const uint64_t rest = hash - leaving_factor_ * static_cast<uint32_t>(leaving);
  return (rest + static_cast<uint32_t>(entering)) * multiplier_;
}

size_t NgramTable::CellOf(const int32_t* text, const int32_t* ngram, uint64_t hash) const {
  const size_t mask = cells_.size() - 1;
  // The high half is the well mixed one: the low bits of the sum depend on the low bits of the tokens alone.
  size_t cell = static_cast<size_t>((hash ^ (hash >> 32)) * multiplier_ >> 32) & mask;
  while (cells_[cell] != 0 && !IsSame(text + cells_[cell] - n_, ngram, n_)) cell = (cell + 1) & mask;
  return cell;
}

void NgramTable::Grow(const int32_t* text) {
  std::vector<int32_t> old(std::max(kMinCells, cells_.size() * 2), 0);
  old.swap(cells_);
  for (const int32_t end : old) {
    if (end == 0) continue;
    const int32_t* ngram = text + end - n_;
    cells_[CellOf(text, ngram, Hash(ngram))] = end;
  }
}

void NgramTable::Extend(const int32_t* text, int32_t end) {
  int32_t e = std::max(num_indexed_ + 1, n_);
  if (e > end) return;
  for (uint64_t hash = Hash(text + e - n_);; ++e) {
    if (2 * (num_entries_ + 1) > cells_.size()) Grow(text);
    int32_t& cell = cells_[CellOf(text, text + e - n_, hash)];
    if (cell == 0) ++num_entries_;
    cell = e;
    num_indexed_ = e;
    if (e == end) return;
    hash = Roll(hash, text[e - n_], text[e]);
  }
}

int32_t NgramTable::Find(const int32_t* text, const int32_t* ngram) const {
  return cells_.empty() ? 0 : cells_[CellOf(text, ngram, Hash(ngram))];
}

Error NgramTable::CheckIntegrity(const int32_t* text, int32_t last_end) const {
  if (num_indexed_ != (last_end < n_ ? 0 : last_end))
    return "num_indexed: expected all tokens but the last, got another number";
  const size_t num_used = cells_.size() - static_cast<size_t>(std::count(cells_.begin(), cells_.end(), 0));
  if (num_used != num_entries_) return "num_entries: expected the number of cells in use, got another";
  if (2 * num_entries_ > cells_.size()) return "cells: expected at most half in use, got more";
  if (!cells_.empty() && !std::has_single_bit(cells_.size()))
    return "cells: expected a power of two, got another number";
  for (size_t cell = 0; cell < cells_.size(); ++cell) {
    const int32_t end = cells_[cell];
    if (end == 0) continue;
    if (end < n_ || end > num_indexed_) return "cells: expected ends of indexed n-grams, got one outside the text";
    const int32_t* ngram = text + end - n_;
    if (CellOf(text, ngram, Hash(ngram)) != cell)
      return "cells: expected every n-gram where it is found, got one elsewhere";
  }
  // Backwards, the first end of an n-gram is its latest: later ones have been found equal to themselves before it.
  size_t num_distinct = 0;
  for (int32_t end = num_indexed_; end >= n_; --end) {
    const int32_t found = Find(text, text + end - n_);
    if (found < end) return "cells: expected the latest end of every n-gram, got an earlier one or none";
    if (found == end) ++num_distinct;
  }
  if (num_distinct != num_entries_) return "num_entries: expected the distinct n-grams of the text, got another number";
  return nullptr;
}

// Committed tokens, then a prefix, then what has been drafted so far.
struct NgramIndex::Text {
  const int32_t* committed;
  int32_t num_committed;
  const int32_t* prefix;
  int32_t num_prefix;

  Text(const NgramProposeParams& p, int32_t r)
      : committed(p.token_table + static_cast<int64_t>(p.slots[r]) * p.max_tokens_per_row),
        num_committed(p.num_tokens[r]),
        prefix(nullptr),
        num_prefix(0) {
    if (p.cu_num_prefix == nullptr) return;
    prefix = p.prefix_token_ids + p.cu_num_prefix[r];
    num_prefix = p.cu_num_prefix[r + 1] - p.cu_num_prefix[r];
  }

  // Drafts excluded.
  int64_t size() const { return static_cast<int64_t>(num_committed) + num_prefix; }

  // committed [0, num_committed), prefix [num_committed, size), drafts [size, ..)
  int32_t at(int64_t i, const int32_t* drafts) const {
    if (i < num_committed) return committed[i];
    return i < size() ? prefix[i - num_committed] : drafts[i - size()];
  }
};

NgramIndex::NgramIndex(int32_t num_slots, int32_t min_n, int32_t max_n)
    : min_n_(min_n), max_n_(max_n), multiplier_(RandomMultiplier()), slots_(static_cast<size_t>(num_slots)) {
  tail_.resize(static_cast<size_t>(max_n));
}

Error NgramIndex::CheckSlots(const int32_t* slots, int32_t count) const {
  for (int32_t i = 0; i < count; ++i)
    if (slots[i] < 0 || static_cast<size_t>(slots[i]) >= slots_.size())
      return "slots: expected 0 .. max_num_seqs - 1, got one outside";
  return nullptr;
}

Error NgramIndex::Begin(const int32_t* slots, int32_t count) {
  if (Error error = CheckSlots(slots, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    Slot fresh;
    fresh.in_use = true;
    for (int32_t n = min_n_; n <= max_n_; ++n) fresh.tables.emplace_back(n, multiplier_);
    slots_[static_cast<size_t>(slots[i])] = std::move(fresh);
  }
  return nullptr;
}

Error NgramIndex::Forget(const int32_t* slots, int32_t count) {
  if (Error error = CheckSlots(slots, count)) return error;
  for (int32_t i = 0; i < count; ++i) slots_[static_cast<size_t>(slots[i])] = Slot{};
  return nullptr;
}

Error NgramIndex::CheckRow(const NgramProposeParams& p, int32_t r) const {
  if (p.slots[r] < 0 || p.slots[r] >= p.num_slots) return "slots: expected rows of token_table, got one outside";
  const Slot& slot = slots_[static_cast<size_t>(p.slots[r])];
  if (!slot.in_use) return "slots: expected slots that were begun, got another";
  if (p.num_tokens[r] < slot.num_tokens) return "num_tokens: expected no fewer than in the slot's last step, got fewer";
  if (p.num_tokens[r] > p.max_tokens_per_row) return "num_tokens: expected at most a row of token_table, got more";
  if (p.max_draft_len[r] < 0) return "max_draft_len: expected >= 0, got a negative length";
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[r + 1] < p.cu_num_prefix[r])
    return "cu_num_prefix: expected rising offsets, got a decrease";
  return nullptr;
}

Error NgramIndex::CheckRows(const NgramProposeParams& p) const {
  if (Error error = CheckSlots(p.slots, p.num_rows)) return error;
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[0] != 0)
    return "cu_num_prefix: expected to start at 0, got another";
  int64_t num_allowed = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (Error error = CheckRow(p, r)) return error;
    num_allowed += p.max_draft_len[r];
  }
  if (num_allowed > p.max_num_drafts) return "max_num_drafts: expected the sum of max_draft_len, got less";
  return nullptr;
}

int32_t NgramIndex::LatestOccurrence(const Slot& slot, const Text& text) {
  const int32_t* text_end = text.committed + text.num_committed;
  if (text.num_prefix > 0) {
    const int64_t length = std::min<int64_t>(max_n_, text.size());
    const int32_t from_prefix = static_cast<int32_t>(std::min<int64_t>(length, text.num_prefix));
    const int32_t from_committed = static_cast<int32_t>(length) - from_prefix;
    std::copy_n(text_end - from_committed, from_committed, tail_.begin());
    std::copy_n(text.prefix + text.num_prefix - from_prefix, from_prefix, tail_.begin() + from_committed);
    text_end = tail_.data() + length;
  }
  // An n-gram that occurred before contains an (n-1)-gram that did: the search ends at the first length not found.
  int32_t latest = 0;
  for (const NgramTable& table : slot.tables) {
    const int32_t n = table.n();
    if (n > text.size()) break;
    const int32_t* ngram = text_end - n;
    // The n-gram that ends the committed tokens is not indexed yet: without a prefix it is the one looked for.
    const bool is_last =
        text.num_prefix > 0 && n <= text.num_committed && IsSame(text.committed + text.num_committed - n, ngram, n);
    const int32_t end = is_last ? text.num_committed : table.Find(text.committed, ngram);
    if (end == 0) break;
    latest = end;
  }
  return latest;
}

Error NgramIndex::Propose(const NgramProposeParams& p) {
  if (Error error = CheckRows(p)) return error;
  p.cu_num_draft[0] = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    Slot& slot = slots_[static_cast<size_t>(p.slots[r])];
    const Text text(p, r);
    // The n-gram that ends the text stays out: it would hide where it occurred before.
    slot.num_tokens = text.num_committed;
    for (NgramTable& table : slot.tables) table.Extend(text.committed, text.num_committed - 1);

    const int32_t latest = p.max_draft_len[r] > 0 ? LatestOccurrence(slot, text) : 0;
    const int32_t num_drafts = latest > 0 ? p.max_draft_len[r] : 0;
    int32_t* const drafts = p.draft_token_ids + p.cu_num_draft[r];
    // latest < text.size(): a draft is copied from the text, or from a draft before it.
    for (int32_t i = 0; i < num_drafts; ++i) drafts[i] = text.at(static_cast<int64_t>(latest) + i, drafts);
    p.cu_num_draft[r + 1] = p.cu_num_draft[r] + num_drafts;
  }
  return nullptr;
}

Error NgramIndex::CheckIntegrity(const int32_t* token_table, int32_t num_slots, int32_t max_tokens_per_row) const {
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    if (!slot.in_use && !slot.tables.empty()) return "tables: expected none where the slot is not in use, got some";
    if (slot.in_use && static_cast<int32_t>(s) >= num_slots)
      return "token_table: expected every slot in use, got fewer";
    if (slot.num_tokens > max_tokens_per_row) return "token_table: expected every token of a slot, got fewer columns";
    const int32_t* text = token_table + static_cast<int64_t>(s) * max_tokens_per_row;
    for (const NgramTable& table : slot.tables)
      if (Error error = table.CheckIntegrity(text, slot.num_tokens - 1)) return error;
  }
  return nullptr;
}

int64_t NgramIndex::num_bytes() const {
  int64_t total = 0;
  for (const Slot& slot : slots_)
    for (const NgramTable& table : slot.tables) total += table.num_bytes();
  return total;
}

}  // namespace fdsd
