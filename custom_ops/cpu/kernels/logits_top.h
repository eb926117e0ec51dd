#pragma once
// The most likely tokens of a row, best first.
#include "logits_cut.h"

namespace fdsd {
namespace FDSD_ISA {

struct Candidate {
  float logit;
  int32_t id;
  float weight;
};

// The kept tokens in the order, without weights. Returns how many; `candidates` has room for them.
inline int CollectSorted(const LogitsRow& row, const Kept& kept, Candidate* candidates) {
  int count = 0;
  ForKeptGroups(row, kept, 0, row.vocab_size(), [&](auto bound, int from, int to) {
    for (int i = from; i < to; i += kLanes) {
      const F32x16 x = LoadLogits(row.logits() + i, to - i);
      for (uint32_t mask = MaskFrom<decltype(bound)::value>(x, Set1(kept.floor)); mask != 0; mask &= mask - 1) {
        const int32_t id = i + __builtin_ctz(mask);
        candidates[count++] = Candidate{row.logits()[id], id, 0.0f};
      }
    }
  });
  std::sort(candidates, candidates + count, [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  });
  return count;
}

// Set the weights of candidates; those under the floor weigh nothing.
inline void WeighCandidates(const Weighting& weighting, float floor, Candidate* candidates, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const int n = std::min(kLanes, count - i);
    alignas(64) float logits[kLanes];
    alignas(64) float weights[kLanes];
    for (int j = 0; j < n; ++j) logits[j] = candidates[i + j].logit;
    Store(Weights<Bound::kInclusive>(LoadLogits(logits, n), weighting, Set1(floor)), weights);
    for (int j = 0; j < n; ++j) candidates[i + j].weight = weights[j];
  }
}

}  // namespace FDSD_ISA
}  // namespace fdsd
