#include "online_estimator.h"

#include <algorithm>
#include <numeric>

namespace fdsd {
namespace {

// What a draft takes of a one-row step where nothing was measured, and rows that this is written down for at first.
constexpr double kUnmeasuredCost = 0.1;
constexpr size_t kUnmeasuredRows = 1024;
// The engine's part of a step with drafts over that of a plain one, at most: of the rarer kind little is known.
constexpr double kMostHost = 2.0;
// Where asking takes more than this part of a step, sources are skipped that others cover, until it takes less than the
// other: with fewer sources it takes half.
constexpr double kHighShare = 0.03, kLowShare = 0.012;
constexpr double kMsPerSecond = 1e3;
// A clock that stood still says that it was quick.
constexpr double kLeastSeconds = 1e-9;

}  // namespace

OnlineEstimator::StepForecast OnlineEstimator::Observe(const ControllerStepParams& p) {
  const ControllerRowsParams& rows = p.next->rows;
  const Step step = {
      .num_kv_tokens = std::accumulate(rows.num_tokens, rows.num_tokens + rows.num_rows, int64_t{0}),
      .num_drafts = std::max(0, p.step.num_rows - p.step.num_prompt_tokens - p.step.num_requests),
      .is_decode_only = p.step.num_requests == rows.num_rows + p.step.num_forbidden && p.step.num_prompt_tokens == 0,
  };
  if (p.step.num_skipped_steps > 0) detector_.Rest(p.step.num_requests, p.step.num_skipped_steps);
  LearnTimes(p, step);
  TellDetector(p, step);
  WriteTimes(p, step.num_kv_tokens);
  const int32_t n = p.step.num_requests;
  // Requests that draft otherwise or not at all get a token in any case.
  p.next->num_outputs = std::max(n, rows.num_rows);
  p.next->least_gain = detector_.LeastGain(n);
  if (p.took.lookup_s > 0.0)
    skips_covered_ = p.took.lookup_s > (skips_covered_ ? kLowShare : kHighShare) * p.took.seconds;
  p.next->skipped_sources = skips_covered_ ? covered_sources_ : 0;
  return {p.next->least_gain,
          detector_.IsOff(n),
          detector_.IsWorthAsking(n),
          detector_.gain(),
          speed_,
          predicted_s_,
          measured_s_,
          step.is_decode_only,
          false};
}

void OnlineEstimator::LearnTimes(const ControllerStepParams& p, const Step& step) {
  const bool has_drafts = step.num_drafts > 0;
  if (p.took.choosing_s > 0.0) drafting_.Observe(p.step.num_requests, p.took.choosing_s);
  if (!step.is_decode_only) return;
  if (cost_ != nullptr) {
    if (p.took.time > 0.0 && p.step.num_skipped_steps == 0 && has_forecast_) {
      predicted_s_ += p.took.time * speed_ / kMsPerSecond - around_s_[has_drafts];
      measured_s_ += p.took.seconds;
    }
    const double ms = kMsPerSecond * std::max(p.took.seconds, kLeastSeconds);
    const double expected = cost_->Expected(p.step.num_rows, p.step.num_requests, step.num_kv_tokens);
    cold_start_.Observe(p.step.num_requests, ms, expected, has_drafts);
    cost_->Observe(p.step.num_rows, p.step.num_requests, step.num_kv_tokens, ms);
  }
  if (p.step.goes_on)
    (has_drafts ? drafted_host_ : host_).Observe(p.step.num_requests, std::max(p.took.host_seconds, 0.0));
}

void OnlineEstimator::TellDetector(const ControllerStepParams& p, const Step& step) {
  int64_t num_new = 0;  // it cannot be compared with others
  if (p.step.num_skipped_steps > 0) {
    num_new = step.is_decode_only ? p.step.num_requests : 0;
  } else if (step.is_decode_only && p.step.goes_on && !p.step.is_certain) {
    num_new = std::max<int64_t>(step.num_kv_tokens - num_kv_tokens_ + p.step.num_forbidden, 0);
  }
  num_kv_tokens_ = step.num_kv_tokens;
  detector_.Observe(
      {.num_requests = p.step.num_requests,
       .num_tokens = static_cast<int32_t>(num_new),
       .num_drafts = step.num_drafts,
       .seconds = std::max(p.took.seconds, kLeastSeconds) + HostSeconds(p.step.num_requests, step.num_drafts > 0),
       .asking_s = p.took.asking_s,
       .slowdown_ratio = p.took.plain_time > 0.0 ? p.took.time / p.took.plain_time : 1.0});
}

double OnlineEstimator::HostSeconds(int32_t num_requests, bool has_drafts) const {
  const double drafted_s = drafted_host_.Seconds(num_requests);
  double plain_s = host_.Seconds(num_requests);
  if (drafted_s > 0.0 && (plain_s == 0.0 || drafted_s < plain_s)) plain_s = drafted_s;
  return has_drafts ? std::min(std::max(drafted_s, plain_s), kMostHost * plain_s) : plain_s;
}

void OnlineEstimator::WriteTimes(const ControllerStepParams& p, int64_t num_kv_tokens) {
  const int32_t n = p.step.num_requests, num_rows = n + p.num_prompt_tokens_ahead;
  ControllerTimesParams& times = p.next->times;
  if (cost_ == nullptr) {
    WriteUnmeasured(num_rows, &times);
    return;
  }
  times = cost_->Times(num_rows, n, num_kv_tokens);
  const double plain_s = HostSeconds(n, false), drafted_s = HostSeconds(n, true), drafting_s = drafting_.Seconds(n);
  speed_ = cost_->speed();
  has_forecast_ = true;
  around_s_[0] = plain_s + drafting_s;
  around_s_[1] = drafted_s + drafting_s;
  times.fixed += kMsPerSecond * around_s_[0] / speed_;
  times.any_draft += kMsPerSecond * (drafted_s - plain_s) / speed_;
  const bool is_first = p.step.num_rows - p.step.num_prompt_tokens <= n;
  if (is_first) times.any_draft += cold_start_.Ms(n);
}

// T(1 + d) = 1 + cost * d.
void OnlineEstimator::WriteUnmeasured(int32_t num_rows, ControllerTimesParams* times) {
  const size_t num_times = static_cast<size_t>(num_rows) + kUnmeasuredRows;
  for (size_t row = unmeasured_.size(); row < num_times; ++row)
    unmeasured_.push_back(kUnmeasuredCost * (static_cast<double>(row) - 1.0));
  *times = {};
  times->num_step_rows = num_rows;
  times->num_times = static_cast<int32_t>(unmeasured_.size());
  times->curve = unmeasured_.data();
  times->fixed = 1.0;
}

}  // namespace fdsd
