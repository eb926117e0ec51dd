// Of which declarations the library is, so that a caller with others refuses it before it fills a struct. A unit of its
// own: it is compiled anew with every change of them, and it is quick.
#include "c_api.h"

// The package's version on the first line, then "path SHA-256" of every file that declares structs, ops or C functions,
// by its path below custom_ops/.
FDSD_EXPORT const char* fdsd_sources() {
  static constexpr char text[] =
#include "sources.inc"
      ;
  return text;
}
