#pragma once
// What stand-ins of products of a warpgroup keep: between their start and the wait for them their elements may not be
// read, and the shared memory that they read may not be written.
#include <cstddef>
#include <cstdint>

#include "emulation/memory.h"

namespace fdsd::emulation {

// Elements that a thread has of a product.
constexpr int kProductElements = 32;

// The running thread's registers are ready for products until it waits.
void BeginProducts();
// A product reads these bytes of shared memory, between now and the wait.
void ReadForProducts(const Allocation* allocation, const void* address, size_t num_bytes);
// What the elements at c will be after the wait; c itself has no meaning until then.
int32_t* StartedElements(int32_t* c);
// The thread's products end.
void WaitForProducts();

}  // namespace fdsd::emulation
