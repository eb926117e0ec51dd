#pragma once
// Weights of tokens, their probabilities up to a factor, and their sums over the tokens that filters keep.
#include "logits_row.h"

namespace fdsd {
namespace FDSD_ISA {

// A token's weight is exp((logit - max) / temperature). The maximum is subtracted first, so that nothing overflows.
struct Weighting {
  float max;
  float scale;  // log2(e) / temperature
};

// The tokens that are kept: logits above `floor`, and those that equal it up to token `last_tied`.
struct Kept {
  float floor;
  int32_t last_tied;
};

// Logarithm of the lightest weight that counts.
constexpr double kLightest = -87.0;
constexpr int32_t kAllTied = std::numeric_limits<int32_t>::max();

inline Kept RaiseFloor(const Kept& kept, float floor) { return floor > kept.floor ? Kept{floor, kAllTied} : kept; }

inline Weighting WeightingOf(float max, float temperature) {
  constexpr double kLog2E = 1.4426950408889634;
  const double scale = kLog2E / static_cast<double>(temperature);  // infinite as a float below 1e-38
  return Weighting{max, static_cast<float>(std::min(scale, static_cast<double>(std::numeric_limits<float>::max())))};
}

// The smallest float x with x >= max + temperature * log_ratio: logits from there on weigh exp(log_ratio) or more.
inline float LogitFloor(float max, float temperature, double log_ratio) {
  const double exact = max + temperature * log_ratio;
  if (exact < kLowest) return kLowest;
  const float near = static_cast<float>(exact);
  return near >= exact ? near : std::nextafter(near, kInf);
}

// Logits under this one weigh nothing: their weight is under the lightest float, or their depth is no float.
inline float LightestLogit(float max, float temperature) {
  const double deepest = static_cast<double>(max) - std::numeric_limits<float>::max();
  return std::max(LogitFloor(max, temperature, kLightest), static_cast<float>(deepest));
}

// Weights of logits down to exp(-87) of the maximum's, 0 for those under the bound. Relative error below 2e-7, and
// another 3e-8 for every unit of depth: n + f is the product with `scale`, exact but for the scale's own rounding.
// 2^f on |f| <= 1/2 is the Taylor polynomial of degree 6.
template <Bound kBound>
FDSD_INLINE F32x16 Weights(F32x16 logits, const Weighting& weighting, F32x16 bound) {
  const F32x16 depth = Sub(logits, Set1(weighting.max));
  const F32x16 scale = Set1(weighting.scale);
  const F32x16 n = RoundNearest(Mul(depth, scale));
  const F32x16 f = Fma(depth, scale, Sub(Set1(0.0f), n));
  F32x16 y = Set1(1.54035304e-4f);
  y = Fma(y, f, Set1(1.33335581e-3f));
  y = Fma(y, f, Set1(9.61812911e-3f));
  y = Fma(y, f, Set1(5.55041087e-2f));
  y = Fma(y, f, Set1(2.40226507e-1f));
  y = Fma(y, f, Set1(6.93147181e-1f));
  y = Fma(y, f, Set1(1.0f));
  return ScaleFrom<kBound>(logits, bound, y, n);
}

// Sums of weights, a lane for every sixteenth token: floats over up to a group, doubles beyond.
class WeightSum {
 public:
  template <Bound kBound>
  FDSD_INLINE void Add(const float* logits, int n, const Weighting& weighting, float floor) {
    const F32x16 bound = Set1(floor);
    F32x16 sum = Set1(0.0f);
    for (int i = 0; i < n; i += kLanes)
      sum = fdsd::FDSD_ISA::Add(sum, Weights<kBound>(LoadLogits(logits + i, n - i), weighting, bound));
    alignas(64) float floats[kLanes];
    Store(sum, floats);
    for (int lane = 0; lane < kLanes; ++lane) lanes_[lane] += floats[lane];
  }

  double Total() const {
    double sums[kLanes];
    std::memcpy(sums, lanes_, sizeof(sums));
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
  }

 private:
  double lanes_[kLanes] = {};
};

// body(Bound constant, begin, end) for the tokens of [begin, end) that are kept from the floor on, then for those that
// are kept above it.
template <typename Body>
FDSD_INLINE void ForSides(const Kept& kept, int begin, int end, Body&& body) {
  const int border = std::clamp(kept.last_tied < end ? static_cast<int>(kept.last_tied) + 1 : end, begin, end);
  if (begin < border) body(std::integral_constant<Bound, Bound::kInclusive>(), begin, border);
  if (border < end) body(std::integral_constant<Bound, Bound::kExclusive>(), border, end);
}

// body(Bound constant, begin, end) for every group of the tokens [begin, end), a chunk, that may have kept ones.
template <typename Body>
FDSD_INLINE void ForKeptGroups(const LogitsRow& row, const Kept& kept, int begin, int end, Body&& body) {
  for (int group = begin; group < end; group += kGroupTokens)
    if (row.group_max()[group / kGroupTokens] >= kept.floor)
      ForSides(kept, group, std::min(group + kGroupTokens, end), body);
}

// Weight of the kept tokens in [begin, end), which starts a group and ends in its chunk.
inline double WeighTokens(const LogitsRow& row, const Weighting& weighting, const Kept& kept, int begin, int end) {
  WeightSum sum;
  ForKeptGroups(row, kept, begin, end, [&](auto bound, int from, int to) {
    sum.Add<decltype(bound)::value>(row.logits() + from, to - from, weighting, kept.floor);
  });
  return sum.Total();
}

// Weight of the kept tokens, of every chunk and of the row.
inline double WeighRow(const LogitsRow& row, const Weighting& weighting, const Kept& kept) {
  row.ForChunks(
      [&](int begin, int end, Chunk* chunk) { chunk->weight = WeighTokens(row, weighting, kept, begin, end); });
  return row.Whole().weight;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
