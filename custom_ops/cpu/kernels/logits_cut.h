#pragma once
// Where a filter cuts a row: the last token, in the order, of the shortest prefix of a size or of a weight. Nothing is
// sorted but the few tokens around the cut: the values are spread over bins by their depth, the bin in which the prefix
// ends is spread again, and so on.
#include "logits_weights.h"

namespace fdsd {
namespace FDSD_ISA {

constexpr int kSortedValues = 32;  // so few are put in order at once
constexpr int kBins = 1024;

// What a prefix is measured by: the number of its tokens, or their weight.
struct CountMeasure {
  FDSD_INLINE F32x16 Of(F32x16) const { return Set1(1.0f); }
};

struct WeightMeasure {
  Weighting weighting;
  float floor;  // of the values
  FDSD_INLINE F32x16 Of(F32x16 logits) const { return Weights<Bound::kInclusive>(logits, weighting, Set1(floor)); }
};

// The end of a prefix of values that are sorted from high to low.
struct PrefixEnd {
  float value;     // the last one
  int num_inside;  // values equal to it in the prefix
  int num_equal;   // and in all
};

struct Range {
  float low;
  float high;
};

inline Range RangeOf(const float* values, int count) {
  F32x16 high = Set1(-kInf);
  F32x16 opposite = Set1(-kInf);
  for (int i = 0; i < count; i += kLanes) {
    // The last lanes repeat the first value.
    alignas(64) float buffer[kLanes];
    const float* from = values + i;
    if (count - i < kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) buffer[lane] = lane < count - i ? from[lane] : values[0];
      from = buffer;
    }
    const F32x16 x = Load(from);
    high = Max(x, high);
    opposite = Max(Sub(Set1(0.0f), x), opposite);
  }
  return Range{-MaxLane(opposite), MaxLane(high)};
}

// Bins of equal width over a range of values, the highest in bin 0; a bin never rises with the value.
class Bins {
 public:
  explicit Bins(const Range& range)
      : high_(Set1(range.high)), scale_(Set1(static_cast<float>(kBins - 1) / (range.high - range.low))) {}

  FDSD_INLINE F32x16 Of(F32x16 values) const {
    // The maximum keeps what a range too wide or too narrow for floats would make of it inside the bins.
    const F32x16 bin = RoundNearest(Mul(Sub(high_, values), scale_));
    return Max(Set1(0.0f), Min(bin, Set1(static_cast<float>(kBins - 1))));
  }

 private:
  F32x16 high_;
  F32x16 scale_;
};

// Add the values' measures to the sums of their bins.
template <typename Measure>
void AddUp(const float* values, int count, const Bins& bins, const Measure& measure, double* sums) {
  // By blocks that go through memory: taking lanes out of registers would cost more than the additions.
  constexpr int kBlock = 128;
  alignas(64) int32_t places[kBlock];
  alignas(64) float amounts[kBlock];
  for (int begin = 0; begin < count; begin += kBlock) {
    const int n = std::min(kBlock, count - begin);
    for (int i = 0; i < n; i += kLanes) {
      const F32x16 x = LoadLogits(values + begin + i, n - i);
      StoreInts(bins.Of(x), places + i);
      Store(measure.Of(x), amounts + i);
    }
    for (int i = 0; i < n; ++i) sums[places[i]] += amounts[i];
  }
}

// Keep the values of one bin, in their order. Returns how many.
inline int KeepBin(float* values, int count, const Bins& bins, int bin) {
  const F32x16 wanted = Set1(static_cast<float>(bin));
  int num_kept = 0;
  for (int i = 0; i < count; i += kLanes) {
    const F32x16 x = LoadLogits(values + i, count - i);
    uint32_t mask = MaskEqual(bins.Of(x), wanted);
    if (count - i < kLanes) mask &= (1u << (count - i)) - 1;
    num_kept += StoreLanes(x, mask, values + num_kept);
  }
  return num_kept;
}

// The end of the prefix of sorted values that makes `before` reach the target; the last value where none does.
template <typename Measure>
PrefixEnd EndOfSorted(const float* values, int count, const Measure& measure, double before, double target) {
  alignas(64) float amounts[kLanes];
  int last = 0;
  for (int i = 0; i < count && before < target; ++i) {
    if (i % kLanes == 0) Store(measure.Of(LoadLogits(values + i, count - i)), amounts);
    before += amounts[i % kLanes];
    last = i;
  }
  PrefixEnd end{values[last], 0, 0};
  for (int i = 0; i < count; ++i) {
    end.num_inside += i <= last && values[i] == end.value;
    end.num_equal += values[i] == end.value;
  }
  return end;
}

// The end of the shortest prefix that reaches the target, or of all values where none does. Values are finite, at least
// one; this reorders them and needs room for kLanes more after them.
template <typename Measure>
PrefixEnd EndOfPrefix(float* values, int count, const Measure& measure, double target) {
  double before = 0.0;
  Range range = RangeOf(values, count);
  while (count > kSortedValues && range.low < range.high) {
    const Bins bins(range);
    double sums[kBins] = {};
    AddUp(values, count, bins, measure, sums);
    int bin = 0;  // the last one seen with anything in it
    for (int b = 1; b < kBins && before + sums[bin] < target; ++b) {
      if (sums[b] == 0.0) continue;
      before += sums[bin];
      bin = b;
    }
    const int num_kept = KeepBin(values, count, bins, bin);
    if (num_kept == count) break;  // the range is wider or narrower than floats can cut
    count = num_kept;
    range = RangeOf(values, count);
  }
  if (range.low < range.high) std::sort(values, values + count, [](float a, float b) { return a > b; });
  return EndOfSorted(values, count, measure, before, target);
}

// The kept logits of a row, by token. They lie in values(0).
inline int GatherKept(const LogitsRow& row, const Kept& kept) {
  row.ForChunks([&](int begin, int end, Chunk* chunk) {
    float* values = row.values(begin / kChunkTokens);
    chunk->count = 0;
    ForKeptGroups(row, kept, begin, end, [&](auto bound, int from, int to) {
      for (int i = from; i < to; i += kLanes) {
        const F32x16 x = LoadLogits(row.logits() + i, to - i);
        const uint32_t mask = MaskFrom<decltype(bound)::value>(x, Set1(kept.floor));
        chunk->count += StoreLanes(x, mask, values + chunk->count);
      }
    });
  });
  int count = row.chunk(0).count;
  for (int c = 1; c < row.num_chunks(); ++c) {
    std::memmove(row.values(0) + count, row.values(c), static_cast<size_t>(row.chunk(c).count) * sizeof(float));
    count += row.chunk(c).count;
  }
  return count;
}

// Token number `nth`, from 1, of those with a logit; there are as many.
inline int32_t FindEqual(const LogitsRow& row, float logit, int nth) {
  for (int g = 0;; ++g) {
    if (row.group_max()[g] < logit) continue;
    const int end = std::min((g + 1) * kGroupTokens, row.vocab_size());
    for (int i = g * kGroupTokens; i < end; i += kLanes) {
      uint32_t mask = MaskEqual(LoadLogits(row.logits() + i, end - i), Set1(logit));
      const int found = __builtin_popcount(mask);
      if (found < nth) {
        nth -= found;
        continue;
      }
      for (; nth > 1; --nth) mask &= mask - 1;
      return i + __builtin_ctz(mask);
    }
  }
}

// What is left of the kept tokens with those after the end of a prefix removed.
inline Kept KeptUpTo(const LogitsRow& row, const Kept& kept, const PrefixEnd& end) {
  if (end.num_inside < end.num_equal) return Kept{end.value, FindEqual(row, end.value, end.num_inside)};
  return end.value == kept.floor ? kept : Kept{end.value, kAllTied};
}

// The first k of the kept tokens; all where they are no more.
inline Kept KeepFirst(const LogitsRow& row, Kept kept, int k) {
  // k groups whose maximum reaches a floor hold k tokens that do, and unless logits tie not many more.
  if (k <= row.num_groups()) {
    int count = 0;
    for (int g = 0; g < row.num_groups(); ++g) {
      row.values(0)[count] = row.group_max()[g];
      count += row.group_max()[g] >= kept.floor;
    }
    if (k <= count) kept = RaiseFloor(kept, EndOfPrefix(row.values(0), count, CountMeasure(), k).value);
  }
  const int count = GatherKept(row, kept);
  if (count <= k) return kept;
  return KeptUpTo(row, kept, EndOfPrefix(row.values(0), count, CountMeasure(), k));
}

// The nucleus of the kept tokens, which weigh `total` together: the shortest prefix that weighs top_p of it.
// A token t lighter than (1 - top_p) / V of the total is outside. t and all tokens after it are at most V, and none is
// heavier than t. So together they weigh less than 1 - top_p of the total, and the tokens before t weigh more than
// top_p of it. The shortest prefix that does ends before t.
inline Kept KeepNucleus(const LogitsRow& row, const Weighting& weighting, float temperature, Kept kept, double top_p,
                        double total) {
  constexpr double kSlack = 2e-5;  // in the logarithm, for the weights' rounding
  const double log_bound = std::log((1.0 - top_p) * total / row.vocab_size()) - kSlack;
  const Kept heavy = RaiseFloor(kept, LogitFloor(weighting.max, temperature, log_bound));
  const int count = GatherKept(row, heavy);
  const WeightMeasure measure{weighting, heavy.floor};
  return KeptUpTo(row, heavy, EndOfPrefix(row.values(0), count, measure, top_p * total));
}

}  // namespace FDSD_ISA
}  // namespace fdsd
