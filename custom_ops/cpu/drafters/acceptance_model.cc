#include "acceptance_model.h"

#include <algorithm>

#include "logistic.h"

namespace fdsd {

using namespace acceptance_cells;

namespace {

constexpr double kFirstWeight = 0.22, kLearningRate = 0.015;
// A cell's first outcomes count as 1 / (their number + kFirstCount), later ones as 1 / kMaxCount.
constexpr double kFirstCount = 1.6;
constexpr uint8_t kMaxCount = 200;
constexpr double kMinCell = 0.002;

// How fast a cell follows, by how many outcomes it has seen.
constexpr auto kRatesByCount = [] {
  std::array<double, kMaxCount + 1> rates{};
  for (size_t n = 0; n < rates.size(); ++n)
    rates[n] = std::max(1.0 / (static_cast<double>(n) + kFirstCount), 1.0 / kMaxCount);
  return rates;
}();

// The prior: higher for longer matches, of later drafts, as those before them were right, and of drafts
// that another source has too.
double PriorLogit(int32_t agreement, int32_t length, int32_t position) {
  constexpr std::array<double, kAgreements> kOfAgreement{0.0, 0.8, -0.5};
  return -1.2 + 0.25 * length + 0.35 * std::min(position, 6) + kOfAgreement[static_cast<size_t>(agreement)];
}
double PriorOfProb(int32_t prob) { return 1.2 * ((prob + 0.5) / kProbs - 0.5); }

}  // namespace

AcceptanceModel::AcceptanceModel(int32_t num_sources, const double* prior_logits)
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
  logits_.assign(static_cast<size_t>(num_cells) + 1, 0.0F);  // the last one knows nothing
  cells_.resize(logits_.size());
  owners_.resize(static_cast<size_t>(sizes[kOfRequest]));
  for (int32_t s = 0; s < num_sources; ++s) SetPriors(s, prior_logits[s]);
}

void AcceptanceModel::SetPriors(int32_t source, double prior_logit) {
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

double AcceptanceModel::Mix(const Prediction& prediction) const {
  const double* weights = &weights_[prediction.weights];
  double x = 0.0;
  for (size_t i = 0; i < kNumTables; ++i) x += weights[i] * logits_[prediction.cells[i]];
  return ToProbability(x);
}

void AcceptanceModel::Learn(const Prediction& prediction, bool is_right) {
  const size_t own = prediction.cells[kOfRequest];
  if (OwnCell(prediction.cells[kOfRequest], prediction.request) != own) {
    owners_[own - static_cast<size_t>(begins_[kOfRequest])] = prediction.request;
    cells_[own] = Cell{};
    logits_[own] = 0.0F;
  }
  const double outcome = is_right ? 1.0 : 0.0;
  const double step = kLearningRate * (outcome - Mix(prediction));
  double* weights = &weights_[prediction.weights];
  // Read, computed and written one after the other: nothing that is computed has to wait for a write.
  std::array<double, kNumTables> probabilities, logits;
  for (size_t i = 0; i < kNumTables; ++i) {
    const Cell& cell = cells_[prediction.cells[i]];
    const double p = cell.probability;
    probabilities[i] = std::clamp(p + kRatesByCount[cell.count] * (outcome - p), kMinCell, 1.0 - kMinCell);
  }
  for (size_t i = 0; i < kNumTables; ++i) logits[i] = Logit(probabilities[i]);
  for (size_t i = 0; i < kNumTables; ++i) {
    float& logit = logits_[prediction.cells[i]];
    Cell& cell = cells_[prediction.cells[i]];
    weights[i] += step * logit;
    logit = static_cast<float>(logits[i]);
    cell.probability = probabilities[i];
    cell.count = std::min<uint8_t>(cell.count + 1, kMaxCount);
  }
}

}  // namespace fdsd
