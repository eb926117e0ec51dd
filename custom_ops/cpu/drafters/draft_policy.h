#pragma once
// Decides in every step which of the drafts that several sources offer are verified. Knows no drafting rule, no model
// and no clock.
#include <cstdint>
#include <vector>

#include "draft_fill.h"
#include "draft_offers.h"
#include "fdsd/policy.h"
#include "survival_model.h"

namespace fdsd {

// Outputs do not depend on drafts. So what a source offered at some place of a text is compared with the text once that
// is committed, whether it was verified or not: what is learned is not biased by what was decided, and a source that is
// not used costs no knowledge.
//
//   offered at token 7   [a b c d]      committed since    a b x
//   scored                a right, b right, c wrong; d is never known
//
// Calls must not overlap.
class DraftPolicy {
 public:
  static constexpr int32_t kMaxDraftLen = 64;
  static constexpr int32_t kNumStats = 7;

  // Checks nothing; see CheckCreate.
  explicit DraftPolicy(const PolicyCreateParams& p);

  static Error CheckCreate(const PolicyCreateParams& p);

  // New requests come into these table rows.
  Error Begin(const int32_t* table_rows, int32_t count);

  // Their requests left; a table row that was not begun is ignored.
  Error Forget(const int32_t* table_rows, int32_t count);

  // Score what was offered in earlier steps, then decide. Arguments are checked before anything changes.
  Error Decide(const PolicyDecideParams& p);

  // Of each source: drafts scored, the sum of their probabilities, how many were right, the sum of the squared errors;
  // then of these offers the drafts wanted, the sum of their survivals, and how many of them were accepted.
  void WriteStats(double* stats) const;

 private:
  // What a source offered at some token of a row's text.
  struct Offer {
    int32_t source;
    int32_t begin;       // index of the token that the first draft stands for
    int32_t num_scored;  // drafts that were right
    int32_t num_wanted;  // first drafts that went into the step
    std::vector<int32_t> token_ids;
    std::vector<SurvivalModel::Prediction> predictions;
  };
  struct Row {
    bool in_use = false;
    uint32_t request = 0;
    double rates[kMaxSources] = {};  // see DraftFacts
    std::vector<Offer> offers;       // that are not scored to their end
  };
  struct Stats {
    double values[kNumStats] = {};
  };

  Error CheckTableRows(const int32_t* table_rows, int32_t count) const;
  Error CheckRows(const PolicyDecideParams& p) const;
  Error CheckOffers(const PolicyDecideParams& p) const;
  void Score(const int32_t* text, int32_t num_tokens, Row* row);
  bool ScoreOffer(const int32_t* text, int32_t num_tokens, Row* row, Offer* offer);
  void Predict(const PolicyDecideParams& p);
  void PredictChain(const PolicyDecideParams& p, int32_t r, int32_t source, int32_t max_drafts);
  int32_t NumOffered(const PolicyDecideParams& p, int32_t r, int32_t source) const;
  void Keep(const PolicyDecideParams& p);
  void KeepOffer(const PolicyDecideParams& p, const DraftChain& chain, int32_t num_wanted, Row* row);
  void Write(const PolicyDecideParams& p) const;

  const int32_t max_draft_len_;
  const std::vector<int32_t> source_ids_;
  SurvivalModel model_;
  DraftFill fill_;
  std::vector<Row> rows_;
  std::vector<Stats> stats_;
  std::vector<double> last_rates_;  // of each source, the requests' latest
  uint32_t num_requests_ = 0;
  uint64_t num_decisions_ = 0;
  std::vector<Offer> spare_;  // scored to their end, for their memory
  // Of the step being decided.
  std::vector<DraftChain> chains_;
  std::vector<double> survivals_;
  std::vector<SurvivalModel::Prediction> predictions_;
};

}  // namespace fdsd
