#pragma once
// How probable it is that a draft is right, given that those before it are. Knows no requests, steps or costs.
#include <array>
#include <cstdint>
#include <vector>

namespace fdsd {

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

// Online and without a look ahead: six small tables of frequencies, each indexed by some of the facts, are mixed in the
// logistic domain with learned weights. A frequency forgets what is older than some 200 outcomes. Two of the tables
// are indexed by the token itself, as where a text is changed is often a matter of which token comes: a name that is
// renamed, a line's end.
//
// Source: the mixing is that of PAQ (Mahoney, Adaptive Weighing of Context Models, 2005).
class SurvivalModel {
 public:
  static constexpr int32_t kNumTables = 6;
  static constexpr int32_t kMaxPositions = 64;

  // A probability and what it was made of.
  struct Prediction {
    std::array<uint16_t, kNumTables> cells;  // of all tables together
    uint16_t weights;                        // the first of its weights
    double probability;
  };

  // What all drafts of an offer have in common.
  struct Offer {
    int32_t source, length, recent, kind, rate;
    uint32_t request;
  };

  // `prior_logits`: [num_sources], 1 .. 8 of them, added to what is believed of a source at first.
  SurvivalModel(int32_t num_sources, const double* prior_logits);

  static Offer Read(const OfferFacts& facts);

  // Written where it is to stay: the copy of one that was just made waits for the small stores of its cells.
  void Predict(const Offer& offer, const DraftFacts& facts, Prediction* made) const;

  // A draft of this token will be predicted soon: have its cells brought into the cache.
  void Prefetch(uint32_t request, int32_t source, int32_t token_id) const;

  // The draft was right, or not.
  void Learn(const Prediction& prediction, bool is_right);

 private:
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
  std::vector<double> weights_;
};

}  // namespace fdsd
