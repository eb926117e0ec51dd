#include "regression_detector.h"

#include <algorithm>

namespace fdsd {

void BatchSizeBucket::Observe(const Step& step) {
  is_seen_ = true;
  PassTime(1);
  if (step.num_tokens > 0) ++num_compared_;
  const bool has_drafts = step.num_drafts > 0;
  if (has_drafts) {
    NoteAnyDrafts();
  } else {
    num_since_plain_ = num_put_off_ = 0;
    if (step.num_tokens > 0) NotePlain(step.seconds / step.num_tokens);
  }
  if (step.num_tokens == 0 || plain_s_.empty()) return;
  const double plain_s = step.num_requests * mean_s_;
  if (!has_drafts) {
    NoteAsked(step.asking_s, plain_s);
    return;
  }
  const double seconds = std::min(step.seconds + step.asking_s, step.slowdown_ratio * step.num_requests * longest_s_);
  NoteDrafts(step.num_tokens, seconds);
  Weigh(seconds / plain_s - static_cast<double>(step.num_tokens) / step.num_requests);
}

void BatchSizeBucket::PassTime(int32_t num_steps) {
  if (level_ == 0) return;
  pause_ -= num_steps;
  if (pause_ > 0) return;
  --level_;
  pause_ = next_pause_;
  is_trial_ = true;
}

double BatchSizeBucket::LeastGain() const { return is_seen_ && IsPlainDue() ? kNever : kDemands[level_]; }

// Whether the next step is to be plain, so that there is something to compare with.
bool BatchSizeBucket::IsPlainDue() const { return num_since_plain_ >= (num_wanted_ > 0 ? 1 : kStepsPerPlain); }

// A plain step took this long per request.
void BatchSizeBucket::NotePlain(double seconds) {
  plain_s_.Add(seconds);
  plain_at_.Add(num_compared_);
  num_wanted_ = std::max(num_wanted_ - 1, 0);
  const size_t count = plain_s_.size(), half = count / 2;
  const double median =
      count % 2 == 1 ? plain_s_.Ranked(half) : (plain_s_.Ranked(half - 1) + plain_s_.Ranked(half)) / 2.0;
  longest_s_ = kLongestStep * median;
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += std::min(plain_s_[i], longest_s_);
  mean_s_ = sum / static_cast<double>(count);
}

// A step had drafts in it. Where a plain one was due they are of requests that did not ask us.
void BatchSizeBucket::NoteAnyDrafts() {
  if (!IsPlainDue()) {
    if (plain_s_.empty()) ++num_since_plain_;  // else those that are compared are counted
    return;
  }
  if (++num_put_off_ == kMostPutOff) num_since_plain_ = num_put_off_ = num_wanted_ = 0;
}

// A step with drafts brought so many tokens in so long.
void BatchSizeBucket::NoteDrafts(int32_t num_tokens, double seconds) {
  ++num_since_plain_;
  ++num_steps_;
  num_tokens_ += num_tokens;
  seconds_ += seconds;
  if (num_steps_ < kStepsPerLook) return;
  gain_ = static_cast<double>(num_tokens_) / seconds_ * mean_s_;
  num_tokens_ = num_steps_ = 0;
  seconds_ = 0.0;
}

// Drafts were asked for, and none was worth a step.
void BatchSizeBucket::NoteAsked(double asking_s, double plain_s) {
  lost_ = std::min(lost_ + asking_s / plain_s, kMostLoss);  // nothing but drafts changes a demand
  NoteWorth(-std::min(asking_s / plain_s, kMostAsking));
}

// Asking brought so much, in plain steps.
void BatchSizeBucket::NoteWorth(double gain) { worth_ = std::min(worth_ + kWorthRate * (gain - worth_), kMostWorth); }

// Drafting lost so much time, in plain steps; negative = it won some.
//
// Source: two cumulative sums, one for each side (Page, Continuous Inspection Schemes, 1954).
void BatchSizeBucket::Weigh(double lost) {
  NoteWorth(-lost);
  lost_ = std::max(0.0, lost_ + lost);
  won_ = std::max(0.0, won_ - lost);
  if (num_wanted_ == 0 && lost_ > kMostLoss) {
    RaiseDemand();
  } else if (won_ > kMostLoss) {
    level_ = std::max(level_ - 1, 0);
    is_trial_ = false;
    pause_ = next_pause_ = kFirstPause;
    lost_ = won_ = 0.0;
  }
}

// Demand more, if enough plain steps were run on the same machine; else see what they take now.
void BatchSizeBucket::RaiseDemand() {
  size_t num_recent = 0;
  for (size_t i = 0; i < plain_at_.size(); ++i) {
    if (num_compared_ - plain_at_[i] <= kRecentSteps) ++num_recent;
  }
  if (num_recent == kFewPlainSteps) {
    level_ = std::min(level_ + 1, kNumDemands - 1);
    if (is_trial_) next_pause_ = std::min(2 * next_pause_, kLongestPause);
    pause_ = next_pause_;
    is_trial_ = false;
  } else {
    num_wanted_ = static_cast<int32_t>(kFewPlainSteps - num_recent);
    while (plain_s_.size() > num_recent) plain_s_.DropOldest();
  }
  lost_ = won_ = 0.0;
}

void RegressionDetector::Observe(const Step& step) {
  latest_ = LoadClass(step.num_requests);
  classes_[latest_].Observe(step);
}

void RegressionDetector::Rest(int32_t num_requests, int32_t num_steps) {
  classes_[LoadClass(num_requests)].PassTime(num_steps);
}

}  // namespace fdsd
