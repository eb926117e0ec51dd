#pragma once
// Where the cells of what is known of a draft lie in the tables of an AcceptanceModel. Knows no frequencies.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace fdsd::acceptance_cells {

constexpr int32_t kMaxPositions = 64;
constexpr int32_t kAgreements = 3, kLengths = 10, kPositions = 8, kProbs = 10, kRates = 8;
constexpr int32_t kFirstPositions = 4, kKinds = 4, kHalfLengths = kLengths / 2;
constexpr int32_t kHashBits = 14;

// How many of the bounds a value has reached; without a branch, as no one foresees it.
template <typename T, size_t N>
constexpr int32_t Bucket(const std::array<T, N>& bounds, T value) {
  int32_t bucket = 0;
  for (const T bound : bounds) bucket += value >= bound ? 1 : 0;
  return bucket;
}

constexpr int32_t kLongLength = 40;
constexpr auto kLengthBuckets = [] {
  constexpr std::array<int32_t, kLengths - 1> kBounds{1, 2, 3, 4, 5, 8, 12, 20, kLongLength};
  std::array<uint8_t, kLongLength + 1> buckets{};
  for (size_t i = 0; i < buckets.size(); ++i)
    buckets[i] = static_cast<uint8_t>(Bucket(kBounds, static_cast<int32_t>(i)));
  return buckets;
}();

constexpr int32_t LengthBucket(int32_t length) {
  return kLengthBuckets[static_cast<size_t>(std::clamp(length, 0, kLongLength))];
}

constexpr auto kPositionBuckets = [] {
  constexpr std::array<int32_t, kPositions - 1> kBounds{1, 2, 3, 4, 6, 9, 14};
  std::array<uint8_t, kMaxPositions> buckets{};
  for (size_t i = 0; i < buckets.size(); ++i)
    buckets[i] = static_cast<uint8_t>(Bucket(kBounds, static_cast<int32_t>(i)));
  return buckets;
}();

constexpr int32_t ProbBucket(float prob) {
  constexpr std::array<float, kProbs - 1> kBounds{0.1F, 0.2F, 0.34F, 0.45F, 0.55F, 0.7F, 0.8F, 0.88F, 0.94F};
  return Bucket(kBounds, prob);
}

constexpr int32_t RateBucket(double rate) { return std::min(kRates - 1, static_cast<int32_t>(rate * kRates)); }

// A token and the hash of a request or a source.
constexpr uint32_t HashOf(uint32_t other) { return other * 2246822519U; }
constexpr int32_t Hash(uint32_t token_id, uint32_t other_hash) {
  return static_cast<int32_t>(((token_id * 2654435761U) ^ other_hash) >> (32 - kHashBits));
}

// Where a fact's cell lies in the first four tables.
constexpr int32_t ByLength(int32_t source, int32_t agreement, int32_t length, int32_t position) {
  return ((source * kAgreements + agreement) * kLengths + length) * kPositions + position;
}
constexpr int32_t ByProb(int32_t source, int32_t agreement, int32_t prob, int32_t position, int32_t kind) {
  return (((source * kAgreements + agreement) * kProbs + prob) * kFirstPositions + position) * kKinds + kind;
}
constexpr int32_t ByRate(int32_t source, int32_t agreement, int32_t rate, int32_t length, int32_t position) {
  return (((source * kAgreements + agreement) * kRates + rate) * kHalfLengths + length) * kFirstPositions + position;
}
constexpr int32_t ByRecent(int32_t source, int32_t agreement, int32_t length, int32_t prob) {
  return ((source * kAgreements + agreement) * kLengths + length) * kProbs + prob;
}

}  // namespace fdsd::acceptance_cells
