#include "survival_model.h"

#include <algorithm>
#include <cmath>

namespace fdsd {
namespace {

constexpr int32_t kAgreements = 3, kLengths = 10, kPositions = 8, kProbs = 10, kRates = 8;
constexpr int32_t kFirstPositions = 4, kKinds = 4, kHalfLengths = kLengths / 2;
constexpr int32_t kHashBits = 14;
constexpr double kFirstWeight = 0.22, kLearningRate = 0.015;
// A cell's first outcomes count as 1 / (their number + kFirstCount), later ones as 1 / kMaxCount.
constexpr double kFirstCount = 1.6;
constexpr uint8_t kMaxCount = 200;
constexpr double kMinCell = 0.002, kMinProbability = 0.001;

double Squash(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double Logit(double p) { return std::log(p / (1.0 - p)); }

// How many of the bounds a value has reached; without a branch, as no one foresees it.
template <typename T, size_t N>
int32_t Bucket(const std::array<T, N>& bounds, T value) {
  int32_t bucket = 0;
  for (const T bound : bounds) bucket += value >= bound ? 1 : 0;
  return bucket;
}

int32_t LengthBucket(int32_t length) {
  static constexpr std::array<int32_t, kLengths - 1> kBounds{1, 2, 3, 4, 5, 8, 12, 20, 40};
  return Bucket(kBounds, length);
}

constexpr auto kPositionBuckets = [] {
  constexpr std::array<int32_t, kPositions - 1> kBounds{1, 2, 3, 4, 6, 9, 14};
  std::array<uint8_t, SurvivalModel::kMaxPositions> buckets{};
  for (size_t i = 0; i < buckets.size(); ++i)
    for (const int32_t bound : kBounds) buckets[i] += static_cast<int32_t>(i) >= bound ? 1 : 0;
  return buckets;
}();

// How fast a cell follows, by how many outcomes it has seen.
constexpr auto kRatesByCount = [] {
  std::array<double, kMaxCount + 1> rates{};
  for (size_t n = 0; n < rates.size(); ++n)
    rates[n] = std::max(1.0 / (static_cast<double>(n) + kFirstCount), 1.0 / kMaxCount);
  return rates;
}();

int32_t ProbBucket(float prob) {
  static constexpr std::array<float, kProbs - 1> kBounds{0.1F, 0.2F, 0.34F, 0.45F, 0.55F, 0.7F, 0.8F, 0.88F, 0.94F};
  return Bucket(kBounds, prob);
}

int32_t RateBucket(double rate) { return std::min(kRates - 1, static_cast<int32_t>(rate * kRates)); }

int32_t Hash(uint32_t token_id, uint32_t other) {
  return static_cast<int32_t>(((token_id * 2654435761U) ^ (other * 2246822519U)) >> (32 - kHashBits));
}

// Where a fact's cell lies in the first four tables.
int32_t ByLength(int32_t source, int32_t agreement, int32_t length, int32_t position) {
  return ((source * kAgreements + agreement) * kLengths + length) * kPositions + position;
}
int32_t ByProb(int32_t source, int32_t agreement, int32_t prob, int32_t position, int32_t kind) {
  return (((source * kAgreements + agreement) * kProbs + prob) * kFirstPositions + position) * kKinds + kind;
}
int32_t ByRate(int32_t source, int32_t agreement, int32_t rate, int32_t length, int32_t position) {
  return (((source * kAgreements + agreement) * kRates + rate) * kHalfLengths + length) * kFirstPositions + position;
}
int32_t ByRecent(int32_t source, int32_t agreement, int32_t length, int32_t prob) {
  return ((source * kAgreements + agreement) * kLengths + length) * kProbs + prob;
}

// What is believed at first: more of longer matches, of later drafts, as those before them were right, and of drafts
// that another source has too.
double PriorLogit(int32_t agreement, int32_t length, int32_t position) {
  constexpr std::array<double, kAgreements> kOfAgreement{0.0, 0.8, -0.5};
  return -1.2 + 0.25 * length + 0.35 * std::min(position, 6) + kOfAgreement[static_cast<size_t>(agreement)];
}
double PriorOfProb(int32_t prob) { return 1.2 * ((prob + 0.5) / kProbs - 0.5); }

}  // namespace

SurvivalModel::SurvivalModel(int32_t num_sources, const double* prior_logits)
    : weights_(static_cast<size_t>(num_sources) * kPositions * kNumTables, kFirstWeight) {
  const int32_t num_pairs = num_sources * kAgreements;
  const std::array<int32_t, kNumTables> sizes{num_pairs * kLengths * kPositions,
                                              num_pairs * kProbs * kFirstPositions * kKinds,
                                              num_pairs * kRates * kHalfLengths * kFirstPositions,
                                              num_pairs * kLengths * kProbs,
                                              1 << kHashBits,
                                              1 << kHashBits};
  int32_t num_cells = 0;
  for (size_t i = 0; i < kNumTables; ++i) {
    begins_[i] = num_cells;
    num_cells += sizes[i];
  }
  logits_.assign(static_cast<size_t>(num_cells), 0.0F);
  cells_.resize(logits_.size());
  for (int32_t s = 0; s < num_sources; ++s) SetPriors(s, prior_logits[s]);
}

void SurvivalModel::SetPriors(int32_t source, double prior_logit) {
  const auto set = [&](size_t table, int32_t cell, double logit) {
    const double p = std::clamp(Squash(logit + prior_logit), kMinCell, 1.0 - kMinCell);
    const auto i = static_cast<size_t>(begins_[table] + cell);
    cells_[i].probability = p;
    logits_[i] = static_cast<float>(Logit(p));
  };
  constexpr int32_t kUsualLength = 4;
  for (int32_t a = 0; a < kAgreements; ++a) {
    for (int32_t length = 0; length < kLengths; ++length) {
      for (int32_t i = 0; i < kPositions; ++i) set(0, ByLength(source, a, length, i), PriorLogit(a, length, i));
      for (int32_t q = 0; q < kProbs; ++q)
        set(3, ByRecent(source, a, length, q), PriorLogit(a, length, 1) + PriorOfProb(q));
    }
    for (int32_t i = 0; i < kFirstPositions; ++i) {
      for (int32_t q = 0; q < kProbs; ++q)
        for (int32_t kind = 0; kind < kKinds; ++kind)
          set(1, ByProb(source, a, q, i, kind), PriorLogit(a, kUsualLength, i) + PriorOfProb(q));
      for (int32_t rate = 0; rate < kRates; ++rate)
        for (int32_t half = 0; half < kHalfLengths; ++half)
          set(2, ByRate(source, a, rate, half, i), PriorLogit(a, 2 * half, i) + 0.3 * (rate - 0.5 * (kRates - 1)));
    }
  }
}

void SurvivalModel::Prefetch(uint32_t request, int32_t source, int32_t token_id) const {
  const auto token = static_cast<uint32_t>(token_id);
  __builtin_prefetch(&logits_[static_cast<size_t>(begins_[4] + Hash(token, request))]);
  __builtin_prefetch(&logits_[static_cast<size_t>(begins_[5] + Hash(token, static_cast<uint32_t>(source)))]);
}

SurvivalModel::Offer SurvivalModel::Read(const OfferFacts& f) {
  const int32_t kind = 2 * f.origin + (f.recent < f.matched ? 1 : 0);
  return {f.source, LengthBucket(f.matched), LengthBucket(f.recent), kind, RateBucket(f.recent_rate), f.request};
}

void SurvivalModel::Predict(const Offer& o, const DraftFacts& f, Prediction* made) const {
  const int32_t position = kPositionBuckets[static_cast<size_t>(f.position)], prob = ProbBucket(f.prob);
  const int32_t first_position = std::min(f.position, kFirstPositions - 1);
  const auto token = static_cast<uint32_t>(f.token_id);
  const std::array<int32_t, kNumTables> cells{ByLength(o.source, f.agreement, o.length, position),
                                              ByProb(o.source, f.agreement, prob, first_position, o.kind),
                                              ByRate(o.source, f.agreement, o.rate, o.length / 2, first_position),
                                              ByRecent(o.source, f.agreement, o.recent, prob),
                                              Hash(token, o.request),
                                              Hash(token, static_cast<uint32_t>(o.source))};
  for (size_t i = 0; i < kNumTables; ++i) made->cells[i] = static_cast<uint16_t>(begins_[i] + cells[i]);
  made->weights = static_cast<uint16_t>((o.source * kPositions + position) * kNumTables);
  made->probability = Mix(*made);
}

double SurvivalModel::Mix(const Prediction& prediction) const {
  const double* weights = &weights_[prediction.weights];
  double x = 0.0;
  for (size_t i = 0; i < kNumTables; ++i) x += weights[i] * logits_[prediction.cells[i]];
  return std::clamp(Squash(x), kMinProbability, 1.0 - kMinProbability);
}

void SurvivalModel::Learn(const Prediction& prediction, bool is_right) {
  const double outcome = is_right ? 1.0 : 0.0;
  const double step = kLearningRate * (outcome - Mix(prediction));
  double* weights = &weights_[prediction.weights];
  for (size_t i = 0; i < kNumTables; ++i) {
    float& logit = logits_[prediction.cells[i]];
    Cell& cell = cells_[prediction.cells[i]];
    double& p = cell.probability;
    weights[i] += step * logit;
    p = std::clamp(p + kRatesByCount[cell.count] * (outcome - p), kMinCell, 1.0 - kMinCell);
    logit = static_cast<float>(Logit(p));
    cell.count = std::min<uint8_t>(cell.count + 1, kMaxCount);
  }
}

}  // namespace fdsd
