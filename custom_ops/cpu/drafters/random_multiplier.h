#pragma once
#include <cstdint>
#include <random>

namespace fdsd {

// Odd, and another one in every process: a client that sends texts cannot make them collide in a hash table. Results
// never depend on it, only the time to find them.
inline uint64_t RandomMultiplier() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device() | 1;
}

}  // namespace fdsd
