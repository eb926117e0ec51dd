#pragma once
// How probable it is that a draft is right, given that those before it are. Knows no requests, steps or costs.
#include <array>
#include <cstdint>
#include <vector>

namespace fdsd {

// What is known of a draft before anything shows whether it is right.
struct DraftFacts {
  int32_t source;
  int32_t position;  // drafts before it
  int32_t matched;   // see DraftEvidence
  int32_t recent;
  int32_t origin;
  int32_t agreement;  // with another source: 0 = none offers anything here, 1 = one has the same, 2 = they differ
  float prob;         // see DraftEvidence; a model's own probability
  int32_t token_id;
  uint32_t request;    // a number of its own
  double recent_rate;  // of the request's latest drafts of this source, how many were right: 0 .. 1
};

// Online and without a look ahead: six small tables of frequencies, each indexed by some of the facts, are mixed in the
// logistic domain with learned weights. A frequency forgets what is older than some 200 outcomes. Two of the tables
// are indexed by the token itself, as where a text is changed is often a matter of which token comes: a name that is
// renamed, a line's end.
//
// Source: the mixing is that of PAQ (Mahoney, Adaptive Weighing of Context Models, 2005).
class SurvivalModel {
 public:
  static constexpr int32_t kNumTables = 6;

  // A probability and what it was made of.
  struct Prediction {
    std::array<int32_t, kNumTables> cells;
    int32_t weights;  // the first of its weights
    double probability;
  };

  // `prior_logits`: [num_sources] added to what is believed of a source at first.
  SurvivalModel(int32_t num_sources, const double* prior_logits);

  Prediction Predict(const DraftFacts& facts) const;

  // The draft was right, or not.
  void Learn(const Prediction& prediction, bool is_right);

 private:
  // What a prediction reads of a table lies apart from what only learning does.
  struct Table {
    std::vector<double> logits;
    std::vector<double> probabilities;
    std::vector<int32_t> counts;
  };

  double Mix(const Prediction& prediction) const;
  void SetPriors(int32_t source, double prior_logit);

  std::array<Table, kNumTables> tables_;
  std::vector<double> weights_;
};

}  // namespace fdsd
