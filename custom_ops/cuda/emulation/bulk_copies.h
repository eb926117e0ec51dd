#pragma once
// Stand-ins of bulk copies and of the barriers that count their bytes. Bytes arrive when a thread waits for them and
// all that was expected is on its way, never sooner: so a read without a wait is found. For the race check, the thread
// that saw them arrive has written them: other threads see them after a barrier.
#include <cstdint>

#include "emulation/memory.h"

namespace fdsd::emulation {

// A barrier of shared memory, 8 bytes, for one arrival.
void InitBarrier(const Allocation* allocation, void* barrier);
// The running thread's barriers may be named by copies.
void FenceBarriers();
// The arrival, which says how many bytes come.
void ExpectBytes(const Allocation* allocation, void* barrier, int64_t num_bytes);
// The source is read now.
void StartBulkCopy(const Allocation* to_allocation, void* to, const Allocation* from_allocation, const void* from,
                   int64_t num_bytes, const Allocation* allocation, void* barrier);
// Wait for the phase with this last bit.
void WaitForBytes(const Allocation* allocation, void* barrier, uint32_t phase_bit);

}  // namespace fdsd::emulation
