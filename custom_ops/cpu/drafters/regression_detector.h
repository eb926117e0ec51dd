#pragma once
// Whether drafting pays: steps with drafts against plain ones that are put between them. Knows no drafts.
#include <array>
#include <cstdint>
#include <iterator>
#include <limits>

#include "statistics.h"

namespace fdsd {

class BatchSizeBucket {
 public:
  struct Step {
    int32_t num_requests;
    // That it brought, of all requests; 0 = it cannot be compared: it had parts of prompts in it, or requests that came
    // or went.
    int32_t num_tokens;
    int32_t num_drafts;     // that were in it
    double seconds;         // everything but what drafting took; > 0 where the step can be compared
    double asking_s;        // seconds that drafting took
    double slowdown_ratio;  // expected time of the step over that of a plain one, >= 1
  };

  // A step is over.
  void Observe(const Step& step);

  // So many steps went by.
  void PassTime(int32_t num_steps);

  // See RegressionDetector.
  double LeastGain() const;
  bool is_off() const { return kDemands[level_] == kNever; }
  double worth() const { return worth_; }
  double gain() const { return gain_; }

 private:
  // Steps with drafts between two plain ones, and until the gain is told.
  static constexpr int64_t kStepsPerPlain = 48, kStepsPerLook = 32;
  // Steps that were to be plain and had others' drafts in them, until that is given up for the time being.
  static constexpr int32_t kMostPutOff = 4;
  // Plain steps that are remembered: the machine's speed changes.
  static constexpr size_t kPlainSteps = 17, kFewPlainSteps = 4;
  // So many comparable steps back a plain step still ran on the same machine, as far as that is known. If other steps
  // counted too, four plain ones would never be found under a load where requests come or go in most steps.
  static constexpr int64_t kRecentSteps = 64;
  // A step that took so many times as long as expected was interrupted; it counts as this. The longer a step is, the
  // more often that happens. So means of both kinds are compared, and no median with a mean.
  static constexpr double kLongestStep = 2.0;
  // What drafts must be expected to bring: tokens per time over those of plain decoding. It is at least a little, as
  // drafts that just break even are a risk for nothing. It is the more, the more drafts lost.
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kDemands[] = {1.03, 1.05, 1.12, 1.25, 1.5, 2.0, kNever};
  static constexpr int32_t kNumDemands = std::size(kDemands);
  // Plain steps' time that drafts may lose before more is demanded, and bring before less is.
  static constexpr double kMostLoss = 2.0;
  // Steps after which less is demanded all the same, and twice as many each time that turned out to be wrong.
  static constexpr int32_t kFirstPause = 256, kLongestPause = 16384;
  // In times of a plain step: what each asking is expected to bring, at first and at most. The limit keeps a text that
  // ends with much gain from speaking for the next one. Then the weight of what the latest asking brought.
  static constexpr double kFirstWorth = 0.5, kMostWorth = 0.5, kWorthRate = 1.0 / 16.0;
  // Asking that took more of a plain step was interrupted, and counts as this.
  static constexpr double kMostAsking = 0.25;

  bool IsPlainDue() const;
  void NotePlain(double seconds);
  void NoteAnyDrafts();
  void NoteDrafts(int32_t num_tokens, double seconds);
  void NoteAsked(double asking_s, double plain_s);
  void NoteWorth(double gain);
  void Weigh(double lost);
  void RaiseDemand();

  bool is_seen_ = false;
  LatestValues<double, kPlainSteps> plain_s_;  // seconds per request of plain steps
  double longest_s_ = 0.0, mean_s_ = 0.0;      // per request: what a plain step counts as at most, and what one takes
  int64_t num_since_plain_ = kStepsPerPlain;
  int32_t num_put_off_ = 0;
  int32_t num_wanted_ = 0;  // plain steps that are to take turns with drafts
  int64_t num_compared_ = 0;
  LatestValues<int64_t, kFewPlainSteps> plain_at_;  // num_compared_ at the latest of plain_s_
  // Since the gain was told.
  int64_t num_tokens_ = 0, num_steps_ = 0;
  double seconds_ = 0.0;
  double gain_ = 0.0;
  int32_t level_ = 0;              // of kDemands
  double lost_ = 0.0, won_ = 0.0;  // plain steps' time, since it was less than nothing
  bool is_trial_ = false;          // less is demanded though nothing was won
  int32_t pause_ = kFirstPause, next_pause_ = kFirstPause;
  double worth_ = kFirstWorth;
};

// Told of every step, asked before the next one. By number of requests (>= 0), in classes of a factor of two: what pays
// for one request may not pay for thirty.
//
// A machine's speed changes from one second to the next, and plain steps are rare where drafts pay. So drafts that seem
// to lose are first compared with plain steps that alternate with them, before more is demanded of them.
class RegressionDetector {
 public:
  using Step = BatchSizeBucket::Step;

  // A step is over.
  void Observe(const Step& step);

  // So many plain steps went by that it is not told of.
  void Rest(int32_t num_requests, int32_t num_steps);

  // Whether asking in steps of so many requests has brought more lately than it took.
  bool IsWorthAsking(int32_t num_requests) const { return Of(num_requests).worth() > 0.0; }

  // What drafts must be expected to bring in the next step of so many requests: 1 or more. Infinite where it is to be
  // plain, as one is due, or because drafts lose whatever is expected of them.
  double LeastGain(int32_t num_requests) const { return Of(num_requests).LeastGain(); }

  // Whether steps of so many requests are plain because drafts did not pay.
  bool IsOff(int32_t num_requests) const { return Of(num_requests).is_off(); }

  // Tokens per second over those of plain steps, in the class of the latest step; 0 = not known yet.
  double gain() const { return classes_[latest_].gain(); }

 private:
  const BatchSizeBucket& Of(int32_t num_requests) const { return classes_[LoadClass(num_requests)]; }

  std::array<BatchSizeBucket, kNumLoadClasses> classes_;
  size_t latest_ = 0;
};

}  // namespace fdsd
