#pragma once
// How probable it is that a draft is right, given that those before it are. Knows no requests, steps or costs.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "logistic.h"
#include "prefetch.h"

namespace fdsd {

// Where the cells of what is known of a draft lie in the tables of an AcceptanceModel.
namespace acceptance_cells {

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

}  // namespace acceptance_cells

// What is known of an offer before anything shows whether its drafts are right.
struct OfferFacts {
  int32_t source;
  int32_t matched;  // see DraftEvidence
  int32_t recent;
  int32_t origin;
  uint32_t request;    // a number of its own
  double recent_rate;  // of the request's latest drafts of this source, how many were right: 0 .. 1
};

// And of one of its drafts.
struct DraftFacts {
  int32_t position;   // drafts before it, < kMaxPositions
  int32_t agreement;  // with another source: 0 = none offers anything here, 1 = one has the same, 2 = they differ
  float prob;         // see DraftEvidence; a model's own probability
  int32_t token_id;
};

// Learns online, from earlier outcomes only. Six small tables of frequencies, each indexed by some of the facts, are
// mixed in the logistic domain with learned weights. A frequency forgets what is older than some 200 outcomes. Two of
// the tables are indexed by the token itself, as the places where a text is changed often depend on the token: a name
// that is renamed, a line's end. One of the two is about each request's tokens. A cell there knows its request, and
// what another request has left in it counts for nothing. After some hundred requests all cells are full of others'
// tokens.
//
// Source: the mixing is that of PAQ (Mahoney, Adaptive Weighing of Context Models, 2005).
class AcceptanceModel {
 public:
  static constexpr int32_t kNumTables = 6;
  static constexpr int32_t kMaxPositions = acceptance_cells::kMaxPositions;

  // A probability and what it was made of.
  struct Prediction {
    std::array<uint16_t, kNumTables> cells;  // of all tables together
    uint16_t weights;                        // the first of its weights
    uint16_t request;                        // see OwnCell
    double probability;
  };

  // What all drafts of an offer have in common: its hashes and weights, and where the cells of its first draft lie in
  // the first four tables if no other source offers anything.
  struct Offer {
    int32_t by_length, by_prob, by_rate, by_recent, weights;
    uint32_t request_hash, source_hash;
    uint16_t request;
  };

  // `prior_logits`: [num_sources], 1 .. 8 of them, added to the logits of a source at first.
  AcceptanceModel(int32_t num_sources, const double* prior_logits);

  Offer Read(const OfferFacts& facts) const;

  // Written where it is to stay: the copy of one that was just made waits for the small stores of its cells.
  void Predict(const Offer& offer, const DraftFacts& facts, Prediction* made) const {
    made->probability = ToProbability(Read(offer, facts, made));
  }

  // The first part of `Predict`: all but the probability; its logit is returned. Where many predictions do not wait for
  // one another, their last parts are faster made together.
  double Read(const Offer& offer, const DraftFacts& facts, Prediction* made) const;
  static double ToProbability(double logit) {
    return std::clamp(Squash(logit), kMinProbability, 1.0 - kMinProbability);
  }

  // A draft of this token will be predicted soon: have its cells brought into the cache.
  void Prefetch(uint32_t request, int32_t source, int32_t token_id) const;

  // What is learned soon: have it brought into the cache.
  void PrefetchToLearn(const Prediction& prediction) const {
    for (const uint16_t cell : prediction.cells) {
      BringIn(&logits_[cell]);
      BringIn(&cells_[cell]);
    }
  }

  // The draft was right, or not.
  void Learn(const Prediction& prediction, bool is_right);

 private:
  static constexpr double kMinProbability = 0.001;
  // Of the tables those by token: of the request, and of all.
  static constexpr size_t kOfRequest = 4, kOfAll = 5;

  // A cell of kOfRequest, or, where it is about another request, one that knows nothing.
  size_t OwnCell(int32_t cell, uint16_t request) const {
    return owners_[static_cast<size_t>(cell - begins_[kOfRequest])] == request ? static_cast<size_t>(cell)
                                                                               : logits_.size() - 1;
  }
  double Mix(const Prediction& prediction) const;
  void SetPriors(int32_t source, double prior_logit);

  std::array<int32_t, kNumTables> begins_;  // of each table among the cells
  // What learning reads of a cell, side by side.
  struct Cell {
    double probability = 0.5;
    uint8_t count = 0;
  };

  // Of each cell. Predicting reads logits only, which are small for that: with hundreds of requests it reads a thousand
  // of them, all over the tables.
  std::vector<float> logits_;
  std::vector<Cell> cells_;
  std::vector<uint16_t> owners_;  // of the cells of kOfRequest: the last bits of the number of the request that learned
  std::vector<double> weights_;
};

// Here, as hundreds of drafts are predicted in a row.

inline void AcceptanceModel::Prefetch(uint32_t request, int32_t source, int32_t token_id) const {
  using namespace acceptance_cells;
  const auto token = static_cast<uint32_t>(token_id);
  const int32_t own = Hash(token, HashOf(request)), of_all = Hash(token, HashOf(static_cast<uint32_t>(source)));
  BringIn(&owners_[static_cast<size_t>(own)]);
  BringIn(&logits_[static_cast<size_t>(begins_[kOfRequest] + own)]);
  BringIn(&logits_[static_cast<size_t>(begins_[kOfAll] + of_all)]);
}

inline AcceptanceModel::Offer AcceptanceModel::Read(const OfferFacts& f) const {
  using namespace acceptance_cells;
  const int32_t kind = 2 * f.origin + (f.recent < f.matched ? 1 : 0);
  const int32_t length = LengthBucket(f.matched);
  return {begins_[0] + ByLength(f.source, 0, length, 0),
          begins_[1] + ByProb(f.source, 0, 0, 0, kind),
          begins_[2] + ByRate(f.source, 0, RateBucket(f.recent_rate), length / 2, 0),
          begins_[3] + ByRecent(f.source, 0, LengthBucket(f.recent), 0),
          f.source * kPositions * kNumTables,
          HashOf(f.request),
          HashOf(static_cast<uint32_t>(f.source)),
          static_cast<uint16_t>(f.request)};
}

inline double AcceptanceModel::Read(const Offer& o, const DraftFacts& f, Prediction* made) const {
  using namespace acceptance_cells;
  const int32_t position = kPositionBuckets[static_cast<size_t>(f.position)], prob = ProbBucket(f.prob);
  const int32_t first_position = std::min(f.position, kFirstPositions - 1);
  const auto token = static_cast<uint32_t>(f.token_id);
  const std::array<int32_t, kNumTables> cells{o.by_length + ByLength(0, f.agreement, 0, position),
                                              o.by_prob + ByProb(0, f.agreement, prob, first_position, 0),
                                              o.by_rate + ByRate(0, f.agreement, 0, 0, first_position),
                                              o.by_recent + ByRecent(0, f.agreement, 0, prob),
                                              begins_[kOfRequest] + Hash(token, o.request_hash),
                                              begins_[kOfAll] + Hash(token, o.source_hash)};
  const int32_t first_weight = o.weights + position * kNumTables;
  const double* weights = &weights_[static_cast<size_t>(first_weight)];
  double x = 0.0;
  for (size_t i = 0; i < kNumTables; ++i) {
    const size_t cell = i == kOfRequest ? OwnCell(cells[i], o.request) : static_cast<size_t>(cells[i]);
    x += weights[i] * logits_[cell];
    made->cells[i] = static_cast<uint16_t>(cells[i]);
  }
  made->weights = static_cast<uint16_t>(first_weight);
  made->request = o.request;
  return x;
}

}  // namespace fdsd
