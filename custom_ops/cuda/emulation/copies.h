#pragma once
// Stand-ins of asynchronous copies to shared memory. Bytes that are on their way may not be touched. They are there
// once their thread has waited, for it alone until a barrier. What was read or written over too early is found as a
// race, or because the bytes are on their way.
#include <cstddef>

#include "emulation/memory.h"

namespace fdsd::emulation {

// Begin to copy up to 16 bytes to shared memory; from nullptr: zeros. The source is read now.
void StartCopy(const Allocation* allocation, void* to, const void* from, size_t num_bytes);
// The running thread's copies since the last call become a group.
void CommitCopies();
// The running thread's groups arrive, but for the last `num_pending`.
void WaitForCopies(size_t num_pending);

}  // namespace fdsd::emulation
