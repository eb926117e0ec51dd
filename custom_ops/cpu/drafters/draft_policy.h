#pragma once
// Decides in every step which of the drafts that several sources offer are verified. Knows no drafting rule, no model
// and no clock.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "acceptance_model.h"
#include "draft_fill.h"
#include "draft_offers.h"
#include "draft_tree.h"
#include "fdsd/controller.h"

namespace fdsd {

// An array that grows and is emptied in every step.
// Keeps its memory, and sets no element that is added: a std::vector sets all of them.
template <typename T>
class GrowingArray {
 public:
  // Add elements at the end, whose values are anything. Returns the first; others may lie elsewhere afterwards.
  T* Extend(size_t count) {
    const size_t first = size_;
    size_ += count;
    if (memory_.size() < size_) memory_.resize(2 * size_);
    return memory_.data() + first;
  }
  void Cut(size_t size) { size_ = size; }

  size_t size() const { return size_; }
  T* data() { return memory_.data(); }
  const T* data() const { return memory_.data(); }
  const T& operator[](size_t i) const { return memory_[i]; }

 private:
  std::vector<T> memory_;
  size_t size_ = 0;
};

// Outputs do not depend on drafts. So what a source offered at some place of a text is compared with the text once that
// is committed, whether it was verified or not: what is learned is not biased by what was decided, and a source that is
// not used costs no knowledge.
//
//   offered at token 7   [a b c d]      committed since    a b x
//   scored                a right, b right, c wrong; d is never known
//
// A row may have a prefix of drafts that are certain. Every chain of the row begins with it: what is offered follows,
// and how much of both is verified is one decision.
//
// Where trees are made, the offers of a row are united: equal drafts after equal drafts become one, as probable as the
// most probable of them, whose source it has. What each source offered is still scored by itself:
//
//   source 0   a ── b ── c        united   a ── b ── c        committed since   a d x
//   source 1   a ── d                      └─── d             scored            a right for both, d for source 1,
//                                                                               b wrong for source 0
//
// Calls must not overlap.
class DraftPolicy {
 public:
  static constexpr int32_t kNumStats = 7;

  // Checks nothing; see CheckCreate.
  explicit DraftPolicy(const ControllerCreateParams& p);

  static Error CheckCreate(const ControllerCreateParams& p);

  // New requests come into these table rows.
  Error Begin(const int32_t* table_rows, int32_t count);

  // Their requests left; a table row that was not begun is ignored.
  Error Forget(const int32_t* table_rows, int32_t count);

  // Have the native drafters offer, and nothing else: p.outcome[2] becomes how many drafts. Asked again for the same
  // text they offer the same.
  Error Ask(const ControllerDecideParams& p);

  // Score what was offered in earlier steps, and have the native drafters offer. Nothing is asked of them where no row
  // may have drafts. Arguments are checked before anything changes; where a drafter refuses, those before it have read
  // the rows, as they would in their next step.
  Error Offer(const ControllerDecideParams& p);

  // Choose from all that is offered. p.outcome becomes, in order: the tokens expected of the step; its time; how many
  // drafts were offered; what a draft adds, as a part of the time of a step without drafts; this time without drafts.
  // Where there is no room for a draft, what it adds is infinity. Last: whether any row's drafts branch, 0 or 1.
  Error Choose(const ControllerDecideParams& p);

  // Both.
  Error Decide(const ControllerDecideParams& p);

  // What the offers of the latest Offer or Choose are worth. By row, of equals by source.
  std::span<const DraftChain> chains() const {
    return makes_trees_ ? std::span(trees_.data(), trees_.size()) : std::span(chains_.data(), chains_.size());
  }
  std::span<const double> accept_probs() const {
    return makes_trees_ ? std::span(tree_probs_.data(), tree_probs_.size())
                        : std::span(accept_probs_.data(), accept_probs_.size());
  }

  int32_t num_sources() const { return static_cast<int32_t>(source_ids_.size()); }
  bool IsBegun(int32_t table_row) const {
    return table_row >= 0 && static_cast<size_t>(table_row) < in_use_.size() &&
           in_use_[static_cast<size_t>(table_row)] != 0;
  }
  // Of the latest first drafts of a source for the request of a table row, how many were right: 0 .. 1.
  double rate(int32_t table_row, int32_t source) const {
    return rates_[static_cast<size_t>(table_row) * source_ids_.size() + static_cast<size_t>(source)];
  }

  // The factor for acceptance probabilities when drafts are chosen by them.
  double calibration() const { return calibration_.value(); }

  // Of each source: drafts scored, the sum of their probabilities, how many were right, the sum of the squared errors.
  // Then of these offers: the drafts wanted, the sum of their acceptance probabilities, how many of them were accepted.
  void WriteStats(double* stats) const;

 private:
  // A draft that waits to be scored.
  struct Guess {
    int32_t token_id;
    int16_t parent;           // the guess of the offer that it follows, -1 = none
    int8_t next_sibling = 0;  // so many guesses later, 0 = there is none
    bool is_wanted = false;   // whether it went into the step, for this source
    AcceptanceModel::Prediction prediction;
  };
  // What a source offered at some token of a row's text.
  struct OpenOffer {
    int32_t source;
    int32_t begin;         // index of the token that the first draft stands for
    int32_t num_prefix;    // first drafts that are not the source's, but come before its own
    int32_t num_scored;    // drafts that were right
    int32_t last_right;    // the last of them, -1 = none
    int32_t num_wanted;    // drafts up to the last one of a path that went into the step
    int32_t num_accepted;  // of those that went into the step
    double accept_prob;    // the sum of theirs
    std::vector<Guess> guesses;
  };
  struct Stats {
    double values[kNumStats] = {};
  };
  Error CheckTableRows(const int32_t* table_rows, int32_t count) const;
  Error CheckRows(const ControllerDecideParams& p) const;
  Error CheckTimes(const ControllerDecideParams& p) const;
  void Score(const ControllerRowsParams& x);
  void PrefetchOffers(const ControllerRowsParams& x, int32_t r) const;
  void PrefetchLearned(const ControllerRowsParams& x, int32_t r) const;
  void ScoreRow(const ControllerRowsParams& x, int32_t r);
  bool ScoreOffer(const int32_t* text, int32_t num_tokens, double* rates, OpenOffer* offer);
  struct RowSource {
    int32_t row;
    int32_t source;
  };
  void PrefetchCells(const ControllerDecideParams& p, const OfferPlanes& planes, RowSource at) const;
  void PredictAll(const ControllerDecideParams& p, const OfferPlanes& planes);
  void PredictBest(const ControllerDecideParams& p, const OfferPlanes& planes);
  void FinishFirst();
  void FinishRow(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r, size_t num_chains_before);
  void Unite(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r);
  void PredictTree(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r, size_t looked_at);
  void AddTree(const ControllerDecideParams& p, int32_t r);
  void MarkWanted();
  int32_t CountWanted(const DraftChain& chain) const;
  int32_t LookAt(const ControllerDecideParams& p, const OfferPlanes& planes, int32_t r, int32_t source,
                 int32_t max_drafts);
  void AddPrefixOnly(const ControllerDecideParams& p, int32_t r);
  void Predict(const ControllerDecideParams& p);
  DraftChain BeginChain(const DraftPrefix& prefix, int32_t r, int32_t source);
  int32_t PredictChain(const OfferPlanes& planes, int32_t table_row, const DraftChain& begun, int32_t max_drafts);
  void Fill(const ControllerDecideParams& p);
  void Keep(const ControllerDecideParams& p);
  void KeepOffer(const ControllerDecideParams& p, const DraftChain& chain, int32_t num_wanted,
                 std::vector<OpenOffer>* open);
  void Write(const ControllerDecideParams& p) const;
  bool WriteTrees(const ControllerDecideParams& p);

  const int32_t max_draft_len_;
  const bool makes_trees_;
  const std::vector<int32_t> source_ids_;
  const AskedDrafters asked_;
  AcceptanceModel model_;
  CalibrationRatio calibration_;
  DraftFill fill_;
  // Of each table row, apart, as some are read of all rows of a step and others of few.
  std::vector<uint8_t> in_use_;
  std::vector<uint32_t> requests_;            // a number of its own for each
  std::vector<double> rates_;                 // [table row, source], see OfferFacts
  std::vector<uint8_t> waits_;                // whether there are open offers
  std::vector<std::vector<OpenOffer>> open_;  // that are not scored to their end
  std::vector<Stats> stats_;
  std::vector<double> last_rates_;  // of each source, the requests' latest
  uint32_t num_requests_ = 0;
  uint64_t num_decisions_ = 0;
  std::vector<OpenOffer> spare_;  // scored to their end, for their memory
  // Of the step being decided.
  bool has_many_offers_ = false;  // more than are looked at
  GrowingArray<DraftChain> chains_;
  GrowingArray<double> accept_probs_;
  GrowingArray<Guess> guesses_;       // of survivals_
  GrowingArray<int32_t> unfinished_;  // of survivals_, those that are logits until FinishFirst
  std::vector<RowSource> best_;       // of rows with many offers, those that are looked at
  std::vector<int32_t> waiting_;      // rows with offers that wait to be scored
  // Where trees are made: a tree of each row, whose drafts have these probabilities.
  struct TreeDraft {
    int32_t token_id;
    int32_t parent;  // of the row, -1 = none
    int32_t guess;   // of guesses_, -1 = a certain draft
    int32_t source;
  };
  GrowingArray<DraftChain> trees_;
  GrowingArray<double> tree_probs_;
  GrowingArray<TreeDraft> tree_drafts_;
  // Of the row whose tree is made.
  struct LookedAt {
    int32_t source;
    int32_t count;  // of its drafts
    int32_t begin;  // in nodes_
  };
  struct Mark {
    uint32_t offered = 0, followed = 0;  // bit s: source s offers the node, or something after it
    double probability = 0.0;            // given that the node before it is accepted
    int32_t guess = -1, source = 0;      // that says so
  };
  struct Kept {
    int32_t guess = -1;       // of the chain, -1 = none
    int32_t last_child = -1;  // likewise
    double accept_prob = 0.0;
    bool differs = false;  // from what another source offers
  };
  DraftTree tree_;
  std::vector<LookedAt> looked_at_;
  std::vector<int32_t> nodes_;  // of each draft of looked_at_
  std::vector<Mark> marks_;     // of each node
  std::vector<Kept> kept_;
  std::vector<int32_t> places_;
  std::vector<int32_t> depths_;  // of an offer's guesses, from 1
};

// Whether a source that takes time to be asked is worth it in a step, for which rows, and how far.
//
// What the other sources offer is known, from DraftPolicy::Offer. The source's own drafts are not: of each it is
// assumed that it is right as often as the request's latest ones were. With these assumed chains the step is filled as
// it would be, once for every number of drafts per row, the time of the call being part of the step's:
//
//   rate(k) = expected tokens / (time of the step + time of a call for k drafts of the rows that take them)
//
// The best k is wanted if its rate is above that of a step without the call.
Error DraftWants(const DraftPolicy& policy, const ControllerWantsParams& p);

}  // namespace fdsd
