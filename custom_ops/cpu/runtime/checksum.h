#pragma once
// Checksums of large files, at the speed of memory. They find damage, not a forgery.
#include <cstdint>

namespace fdsd {

// XXH64 with seed 0 of num_bytes bytes. Source: the xxHash specification, github.com/Cyan4973/xxHash.
uint64_t Checksum(const void* data, int64_t num_bytes);

// Checksum of each chunk of chunk_bytes > 0 bytes, the last one shorter, on all threads: DivideUp(num_bytes,
// chunk_bytes) values.
void ChunkChecksums(const void* data, int64_t num_bytes, int64_t chunk_bytes, uint64_t* checksums);

}  // namespace fdsd
