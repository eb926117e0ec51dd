#pragma once
// What the files of C functions share.
#include <new>

#include "fdsd/status.h"

#define FDSD_EXPORT extern "C" __attribute__((visibility("default")))

namespace fdsd {

// Run a body that allocates; nothing is thrown across a C function.
template <typename Body>
Error WithinMemory(Error out_of_memory, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  }
}

}  // namespace fdsd
