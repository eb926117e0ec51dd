// C functions over checksums and the version of the packed layout.
#include "c_api.h"
#include "checksum.h"
#include "linear_layout.h"

FDSD_EXPORT int32_t fdsd_packed_layout_version() { return fdsd::kPackedLayoutVersion; }

FDSD_EXPORT fdsd::Error fdsd_chunk_checksums(const void* data, int64_t num_bytes, int64_t chunk_bytes,
                                             uint64_t* checksums) {
  if (num_bytes < 0) return "num_bytes: expected 0 or more, got a negative number";
  if (chunk_bytes < 1) return "chunk_bytes: expected 1 or more, got another number";
  fdsd::ChunkChecksums(data, num_bytes, chunk_bytes, checksums);
  return nullptr;
}
