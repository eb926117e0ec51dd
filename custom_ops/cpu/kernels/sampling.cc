#include "sampling_filter.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Find where a sum exceeds a target: Feed weights in order; the last one with any is the answer where none does, which
// rounding may bring about.
class Search {
 public:
  Search(double before, double target) : before_(before), target_(target) {}

  // Whether the sum exceeds the target with the weight of `place`, or did before.
  FDSD_INLINE bool Ends(int place, double weight) {
    if (has_ended_ || weight == 0.0) return has_ended_;
    before_ += last_;
    last_ = weight;
    place_ = place;
    has_ended_ = before_ + last_ > target_;
    return has_ended_;
  }

  int place() const { return place_; }       // -1 = nothing had any weight
  double before() const { return before_; }  // the sum up to it

 private:
  double before_;
  double target_;
  double last_ = 0.0;
  int place_ = -1;
  bool has_ended_ = false;
};

// First kept token of a group at which the weights exceed the target.
int32_t DrawFromGroup(const LogitsRow& row, const Weighting& weighting, const Kept& kept, int begin, int end,
                      Search search) {
  ForSides(kept, begin, end, [&](auto bound, int from, int to) {
    for (int i = from; i < to; i += kLanes) {
      alignas(64) float weights[kLanes];
      const F32x16 logits = LoadLogits(row.logits() + i, to - i);
      Store(Weights<decltype(bound)::value>(logits, weighting, Set1(kept.floor)), weights);
      for (int lane = 0; lane < kLanes; ++lane)
        if (search.Ends(i + lane, weights[lane])) return;
    }
  });
  return search.place();
}

// First kept token, by id, whose running weight exceeds u times the whole: the chunk by the weights of the chunks, the
// group in it, the token in that. `total` and the chunks' weights are those of the kept tokens.
int32_t Draw(const LogitsRow& row, const Weighting& weighting, const Kept& kept, double u, double total) {
  const double target = u * total;
  Search chunk(0.0, target);
  for (int c = 0; c < row.num_chunks() && !chunk.Ends(c, row.chunk(c).weight); ++c) {
  }
  const int begin = chunk.place() * kChunkTokens;
  const int end = std::min(begin + kChunkTokens, row.vocab_size());
  Search group(chunk.before(), target);
  for (int g = begin; g < end; g += kGroupTokens)
    if (group.Ends(g, WeighTokens(row, weighting, kept, g, std::min(g + kGroupTokens, end)))) break;
  const int first = group.place();
  return DrawFromGroup(row, weighting, kept, first, std::min(first + kGroupTokens, end),
                       Search(group.before(), target));
}

int32_t SampleRow(const SampleParams& p, int64_t index) {
  const RuledTokens tokens = TokensOf(p, index);
  const LogitsRow row(tokens.logits, tokens.count);
  if (row.argmax() < 0 || IsGreedy(p, index)) return tokens.IdOf(row.argmax());
  const RowPlan plan = PlanOf(p, index, row.max());
  Kept kept = RaiseFloor(plan.kept, plan.lightest);
  if (plan.top_k > 0) kept = KeepFirst(row, kept, plan.top_k);
  double total = WeighRow(row, plan.weighting, kept);
  if (plan.top_p < 1.0) {
    kept = KeepNucleus(row, plan.weighting, plan.temperature, kept, plan.top_p, total);
    total = WeighRow(row, plan.weighting, kept);
  }
  return tokens.IdOf(Draw(row, plan.weighting, kept, plan.u, total));
}

// Draw the rows of a request one after the other: those whose draft is the token of the row that they follow.
void SampleRequest(const SampleParams& p, int32_t r) {
  constexpr int32_t kNotDrawn = -2;
  const int32_t first = p.drafted.cu_num_logits[r];
  const int32_t* drafts = p.drafted.draft_token_ids + p.drafted.cu_num_draft[r];
  for (int32_t row = first; row < p.drafted.cu_num_logits[r + 1]; ++row) {
    const int32_t parent = p.drafted.parent_rows == nullptr ? row - 1 : first + p.drafted.parent_rows[row];
    const bool is_drawn = row == first || p.token_ids[parent] == drafts[row - first - 1];
    p.token_ids[row] = is_drawn ? SampleRow(p, row) : kNotDrawn;
  }
}

}  // namespace

Error Sample(const SampleParams& p) {
  if (Error error = CheckSampleParams(p)) return error;
  if (p.stops_at_wrong_draft != 0 && p.drafted.cu_num_logits == nullptr)
    return "drafted: expected the drafts that rows follow where wrong ones stop, got none";
  if (p.stops_at_wrong_draft != 0) {
    ForEach(p.num_requests, [&](int64_t r) { SampleRequest(p, static_cast<int32_t>(r)); });
  } else {
    ForEach(p.num_rows, [&](int64_t row) { p.token_ids[row] = SampleRow(p, row); });
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
