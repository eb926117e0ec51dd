#pragma once
// Steps by their number of requests, in classes of a factor of two.
#include <bit>
#include <cstddef>
#include <cstdint>

namespace fdsd {

inline constexpr size_t kNumLoadClasses = 32;

// num_requests: >= 0. 0 is a class of its own, then 1, 2 .. 3, 4 .. 7, and so on.
inline size_t LoadClass(int32_t num_requests) {
  return static_cast<size_t>(std::bit_width(static_cast<uint32_t>(num_requests)));
}

}  // namespace fdsd
