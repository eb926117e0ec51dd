#pragma once
// What stand-ins of products of a warpgroup keep. Between their start and the wait for them, their elements may not be
// read, and the shared memory that they read may not be written.
#include <cstddef>
#include <cstdint>

#include "emulation/memory.h"

namespace fdsd::emulation {

// The running thread's registers are ready for products until it waits.
void BeginProducts();
// A product reads these bytes of shared memory, between now and the wait.
void ReadForProducts(const Allocation* allocation, const void* address, size_t num_bytes);
// What the elements at c, of 4 bytes each, will be after the wait; c itself has no meaning until then.
void* StartedElements(void* c, size_t count);
// The thread's products end.
void WaitForProducts();

}  // namespace fdsd::emulation
