// C functions of the n-gram index, for ctypes. Nothing is thrown across them.
#include <cmath>

#include "c_api.h"
#include "ngram_index.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the n-gram index, got none";

}  // namespace

namespace fdsd {

struct NgramCreateParams {
  int32_t num_slots;
  int32_t min_n;
  int32_t max_n;
  double max_factor;
  int32_t follows_copies;  // 0 or 1
  NgramIndex** index;      // [1], to be destroyed with fdsd_ngram_destroy
};

struct NgramCheckParams {
  const NgramIndex* index;
  int32_t num_slots;
  int32_t max_tokens_per_row;
  const int32_t* token_table;  // [num_slots, max_tokens_per_row]
};

}  // namespace fdsd

FDSD_EXPORT fdsd::Error fdsd_ngram_create(const fdsd::NgramCreateParams* p) {
  if (p->num_slots < 0) return "num_slots: expected >= 0, got a negative number";
  if (p->min_n < 1 || p->max_n < p->min_n) return "min_n: expected 1 <= min_n <= max_n, got another order";
  if (!(p->max_factor > 0) || std::isinf(p->max_factor)) return "max_factor: expected a finite number > 0, got another";
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->index = new fdsd::NgramIndex(p->num_slots, {p->min_n, p->max_n, p->max_factor, p->follows_copies != 0});
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_ngram_destroy(fdsd::NgramIndex* index) { delete index; }

FDSD_EXPORT fdsd::Error fdsd_ngram_begin(const fdsd::NgramSlotsParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->drafter->Begin(p->slots, p->count); });
}

FDSD_EXPORT fdsd::Error fdsd_ngram_forget(const fdsd::NgramSlotsParams* p) {
  return p->drafter->Forget(p->slots, p->count);
}

FDSD_EXPORT fdsd::Error fdsd_ngram_propose(const fdsd::NgramProposeParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->drafter->Propose(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_ngram_check_integrity(const fdsd::NgramCheckParams* p) {
  return p->index->CheckIntegrity(p->token_table, p->num_slots, p->max_tokens_per_row);
}

FDSD_EXPORT int64_t fdsd_ngram_num_bytes(const fdsd::NgramIndex* index) { return index->num_bytes(); }
