// C functions of the n-gram index, for ctypes. Nothing is thrown across them.
#include <cmath>

#include "c_api.h"
#include "ngram_index.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the n-gram index, got none";

template <typename Params>
fdsd::NgramIndex* Drafter(const Params* p) {
  return static_cast<fdsd::NgramIndex*>(p->drafter);
}

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_ngram_create(const fdsd::NgramCreateParams* p) {
  if (p->num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  if (p->min_n < 1 || p->max_n < p->min_n) return "min_n: expected 1 <= min_n <= max_n, got another order";
  if (!(p->max_factor > 0) || std::isinf(p->max_factor)) return "max_factor: expected a finite number > 0, got another";
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->index = new fdsd::NgramIndex(p->num_table_rows, {p->min_n, p->max_n, p->max_factor, p->follows_copies != 0});
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_ngram_destroy(fdsd::NgramIndex* index) { delete index; }

FDSD_EXPORT fdsd::Error fdsd_ngram_begin(const fdsd::DraftTableRowsParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return Drafter(p)->Begin(p->table_rows, p->count); });
}

FDSD_EXPORT fdsd::Error fdsd_ngram_forget(const fdsd::DraftTableRowsParams* p) {
  return Drafter(p)->Forget(p->table_rows, p->count);
}

FDSD_EXPORT fdsd::Error fdsd_ngram_propose(const fdsd::DraftProposeParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return Drafter(p)->Propose(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_ngram_check_integrity(const fdsd::NgramCheckParams* p) {
  return p->index->CheckIntegrity(p->token_table, p->num_table_rows, p->max_tokens_per_row);
}

FDSD_EXPORT int64_t fdsd_ngram_num_bytes(const fdsd::NgramIndex* index) { return index->num_bytes(); }
