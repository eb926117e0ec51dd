#include "checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "thread_pool.h"

namespace fdsd {
namespace {

static_assert(std::endian::native == std::endian::little, "the specification reads little-endian words");

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87u;
constexpr uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fu;
constexpr uint64_t kPrime3 = 0x165667b19e3779f9u;
constexpr uint64_t kPrime4 = 0x85ebca77c2b2ae63u;
constexpr uint64_t kPrime5 = 0x27d4eb2f165667c5u;
constexpr int kWordBytes = 8;
constexpr int kLanes = 4;
constexpr int kStripeBytes = kLanes * kWordBytes;

template <typename Word>
Word Read(const uint8_t* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint64_t Round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

// The four lanes over all whole stripes, folded into one; moves `data` past them.
uint64_t FoldStripes(const uint8_t*& data, int64_t num_bytes) {
  uint64_t lanes[kLanes] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
  for (const uint8_t* end = data + num_bytes / kStripeBytes * kStripeBytes; data < end; data += kStripeBytes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = Round(lanes[i], Read<uint64_t>(data + i * kWordBytes));
  }
  uint64_t sum = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (const uint64_t lane : lanes) sum = (sum ^ Round(0, lane)) * kPrime1 + kPrime4;
  return sum;
}

}  // namespace

uint64_t Checksum(const void* data, int64_t num_bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  const uint8_t* const end = from + num_bytes;
  uint64_t sum = num_bytes >= kStripeBytes ? FoldStripes(from, num_bytes) : kPrime5;
  sum += static_cast<uint64_t>(num_bytes);
  for (; end - from >= kWordBytes; from += kWordBytes) {
    sum = std::rotl(sum ^ Round(0, Read<uint64_t>(from)), 27) * kPrime1 + kPrime4;
  }
  if (end - from >= 4) {
    sum = std::rotl(sum ^ Read<uint32_t>(from) * kPrime1, 23) * kPrime2 + kPrime3;
    from += 4;
  }
  for (; from < end; ++from) sum = std::rotl(sum ^ *from * kPrime5, 11) * kPrime1;
  sum = (sum ^ sum >> 33) * kPrime2;
  sum = (sum ^ sum >> 29) * kPrime3;
  return sum ^ sum >> 32;
}

void ChunkChecksums(const void* data, int64_t num_bytes, int64_t chunk_bytes, uint64_t* checksums) {
  ParallelFor((num_bytes + chunk_bytes - 1) / chunk_bytes, [&](int64_t chunk) {
    const int64_t begin = chunk * chunk_bytes;
    checksums[chunk] = Checksum(static_cast<const uint8_t*>(data) + begin, std::min(chunk_bytes, num_bytes - begin));
  });
}

}  // namespace fdsd
