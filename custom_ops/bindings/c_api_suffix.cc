// C functions of suffix decoding, for ctypes. Nothing is thrown across them.
#include "c_api.h"
#include "suffix_drafter.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the suffix automata, got none";

template <typename Params>
fdsd::SuffixDrafter* Drafter(const Params* p) {
  return static_cast<fdsd::SuffixDrafter*>(p->drafter);
}

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_suffix_create(const fdsd::SuffixCreateParams* p) {
  if (fdsd::Error error = fdsd::SuffixDrafter::CheckCreate(*p)) return error;
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    *p->drafter = new fdsd::SuffixDrafter(*p);
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_suffix_destroy(fdsd::SuffixDrafter* drafter) { delete drafter; }

FDSD_EXPORT fdsd::Error fdsd_suffix_begin(const fdsd::SuffixBeginParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->drafter->Begin(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_suffix_forget(const fdsd::DraftTableRowsParams* p) {
  return Drafter(p)->Forget(p->table_rows, p->count);
}

FDSD_EXPORT fdsd::Error fdsd_suffix_propose(const fdsd::DraftProposeParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return Drafter(p)->Propose(*p); });
}

FDSD_EXPORT void fdsd_suffix_stats(const fdsd::SuffixDrafter* drafter, fdsd::SuffixStats* stats) {
  *stats = drafter->stats();
}

FDSD_EXPORT fdsd::Error fdsd_suffix_export(const fdsd::SuffixSequencesParams* p) { return p->drafter->Export(*p); }

FDSD_EXPORT fdsd::Error fdsd_suffix_import(const fdsd::SuffixSequencesParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return p->drafter->Import(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_suffix_count(const fdsd::SuffixCountParams* p) { return p->drafter->Count(*p); }

FDSD_EXPORT fdsd::Error fdsd_suffix_check_integrity(const fdsd::SuffixDrafter* drafter) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return drafter->CheckIntegrity(); });
}
