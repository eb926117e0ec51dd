// Philox4x32-10, a counter-based generator: the n-th number is computed from n and a key, nothing is carried over.
#include "fdsd/sampling.h"

namespace fdsd {
namespace {

// Four random words from four counter and two key words, all in place.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants as in Random123.
void Philox4x32(uint32_t counter[4], uint32_t key[2]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
    counter[0] = next0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = next2;
    counter[3] = static_cast<uint32_t>(product0);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
}

}  // namespace

// Counter (position, 0, 0, 0), key (low, high half of seed); the first two words, first one high, give 53 bits.
double PhiloxUniform(uint64_t seed, uint32_t position) {
  uint32_t counter[4] = {position, 0, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  Philox4x32(counter, key);
  const uint64_t bits = (uint64_t{counter[0]} << 32 | counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace fdsd
