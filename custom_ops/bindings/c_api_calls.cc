// C functions of objects with state, for ctypes: every call that the headers declare, and what is no such call. Nothing
// is thrown across them.
#include "c_api.h"
#include "declarations.inc"
#include "draft_controller.h"
#include "ngram_index.h"
#include "prediction_drafter.h"
#include "suffix_drafter.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for what the call keeps, got none";

}  // namespace

#define FDSD_CALL(Name, Params, snake)                                       \
  FDSD_EXPORT fdsd::Error fdsd_##snake(const fdsd::Params* p) {              \
    return fdsd::WithinMemory(kOutOfMemory, [&] { return fdsd::Name(*p); }); \
  }
#include "declarations.inc"
#undef FDSD_CALL

FDSD_EXPORT void fdsd_controller_destroy(fdsd::DraftController* controller) { delete controller; }
FDSD_EXPORT void fdsd_ngram_destroy(fdsd::NgramIndex* index) { delete index; }
FDSD_EXPORT void fdsd_prediction_destroy(fdsd::PredictionDrafter* drafter) { delete drafter; }
FDSD_EXPORT void fdsd_suffix_destroy(fdsd::SuffixDrafter* drafter) { delete drafter; }
FDSD_EXPORT int64_t fdsd_ngram_num_bytes(const fdsd::NgramIndex* index) { return index->num_bytes(); }
FDSD_EXPORT int64_t fdsd_prediction_num_bytes(const fdsd::PredictionDrafter* drafter) { return drafter->num_bytes(); }
FDSD_EXPORT void fdsd_suffix_stats(const fdsd::SuffixDrafter* drafter, fdsd::SuffixStats* stats) {
  *stats = drafter->stats();
}
FDSD_EXPORT fdsd::Error fdsd_suffix_check_integrity(const fdsd::SuffixDrafter* drafter) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return drafter->CheckIntegrity(); });
}
