#pragma once
// Has a line of memory brought into the cache. Knows nothing.

namespace fdsd {

// The empty statement keeps compilers from taking a function that does nothing else for one without effects, and
// leaving out its calls, as GCC does.
inline void BringIn(const void* address) {
  __builtin_prefetch(address);
  asm volatile("");
}

}  // namespace fdsd
