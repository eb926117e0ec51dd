#include "ngram_table.h"

#include <algorithm>
#include <bit>

namespace fdsd {
namespace {

constexpr size_t kMinCells = 16;

bool IsSame(const int32_t* a, const int32_t* b, int32_t n) { return std::equal(a, a + n, b); }

}  // namespace

NgramTable::NgramTable(int32_t n, uint64_t multiplier, bool keeps_earlier)
    : n_(n), multiplier_(multiplier), leaving_factor_(1), keeps_earlier_(keeps_earlier) {
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

void NgramTable::Extend(const int32_t* text, int32_t end, NgramMatch* before) {
  const int32_t first = std::max(num_indexed_ + 1, n_);
  if (first > end) return;
  if (keeps_earlier_) earlier_.resize(static_cast<size_t>(end) + 1, 0);
  uint64_t hash = Hash(text + first - n_);
  for (int32_t e = first;; ++e) {
    if (2 * (num_entries_ + 1) > cells_.size()) Grow(text);
    int32_t& cell = cells_[CellOf(text, text + e - n_, hash)];
    if (cell == 0) {
      ++num_entries_;
    } else {
      before[end - e] = {n_, cell, n_};
    }
    if (keeps_earlier_) earlier_[static_cast<size_t>(e)] = cell;
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
    if (end < n_ || end > num_indexed_)
      return "cells: expected ends of indexed n-grams, got one outside the "
             "text";
    const int32_t* ngram = text + end - n_;
    if (CellOf(text, ngram, Hash(ngram)) != cell)
      return "cells: expected every n-gram where it is found, got one "
             "elsewhere";
  }
  // Backwards, the first end of an n-gram is its latest: later ones have been found equal to themselves before it.
  size_t num_distinct = 0;
  int32_t num_reached = 0;
  for (int32_t end = num_indexed_; end >= n_; --end) {
    const int32_t found = Find(text, text + end - n_);
    if (found < end)
      return "cells: expected the latest end of every n-gram, got an earlier "
             "one or none";
    if (found != end) continue;
    ++num_distinct;
    for (int32_t e = end; keeps_earlier_ && e != 0; e = Earlier(e), ++num_reached)
      if (e > end || (e < end && !IsSame(text + e - n_, text + end - n_, n_)))
        return "earlier: expected earlier ends of the same n-gram, got another";
  }
  if (keeps_earlier_ && num_reached != std::max(0, num_indexed_ - n_ + 1))
    return "earlier: expected every indexed end, got others";
  if (num_distinct != num_entries_)
    return "num_entries: expected the distinct n-grams of the text, got "
           "another number";
  return nullptr;
}

}  // namespace fdsd
