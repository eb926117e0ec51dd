#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "draft_policy.h"

namespace fdsd {
namespace {

// A call must bring this much more than it takes, as what it brings is a guess.
constexpr double kPrice = 1.02;
// Whatever a pass takes, drafts as probable as this are gone on with.
constexpr float kMostAcceptance = 0.9F;

class Wants {
 public:
  Wants(const DraftPolicy& policy, const ControllerWantsParams& p)
      : policy_(policy), p_(p), free_chains_(policy.chains()), demand_{policy.calibration(), 1.0} {
    for (int32_t r = 0; r < p.num_rows; ++r)
      accept_priors_.push_back(std::max(policy.rate(p.table_rows[r], p.source), p.min_acceptance_prior));
  }

  Error Run() {
    const double plain_rate = RateWithout();
    double best_rate = kPrice * plain_rate;
    int32_t best = 0;
    std::vector<int32_t> takers;
    for (int32_t k = 1; k <= p_.max_drafts; ++k) {
      const double rate = RateOf(k);
      if (rate <= best_rate) continue;
      best_rate = rate;
      best = k;
      takers = takers_;
    }
    std::fill_n(p_.num_wanted, p_.num_rows, 0);
    for (const int32_t r : takers) p_.num_wanted[r] = std::min(best, p_.max_draft_len[r]);
    p_.outcome[0] = best == 0 ? 1.0 : best_rate / plain_rate;
    p_.outcome[1] = best == 0 ? 0.0 : LeastAcceptance(best_rate, takers);
    p_.outcome[2] = static_cast<double>(policy_.accept_probs().size());
    return nullptr;
  }

 private:
  double RateWithout() {
    const DraftFill::Outcome found = fill_.Choose(free_chains_, policy_.accept_probs(), p_.num_outputs,
                                                  DraftTimes(p_.times, p_.max_num_chosen), demand_);
    return found.num_tokens / found.time;
  }

  double CallTime(const std::vector<int32_t>& rows, int32_t num_drafts) const {
    const auto count = static_cast<double>(rows.size());
    double time =
        p_.call.first + p_.call.per_row * count + (num_drafts - 1) * (p_.call.per_pass + p_.call.per_pass_row * count);
    for (const int32_t r : rows) time += p_.catch_up[r];
    return time;
  }

  // Afterwards takers_ are the rows whose drafts would be taken.
  double RateOf(int32_t num_drafts) {
    Imagine(num_drafts);
    ControllerTimesParams with_call = p_.times;
    const double call_time = CallTime(askable_, num_drafts);
    with_call.fixed += call_time;
    const DraftFill::Outcome found =
        fill_.Choose(chains_, accept_probs_, p_.num_outputs, DraftTimes(with_call, p_.max_num_chosen), demand_);
    takers_.clear();
    for (size_t c = 0; c < chains_.size(); ++c)
      if (chains_[c].source == p_.source && fill_.counts()[c] > 0) takers_.push_back(chains_[c].row);
    return takers_.empty() ? 0.0 : found.num_tokens / (found.time - call_time + CallTime(takers_, num_drafts));
  }

  // The offers of the others, and after those of each row what the source might offer.
  void Imagine(int32_t num_drafts) {
    chains_.clear();
    askable_.clear();
    accept_probs_.assign(policy_.accept_probs().begin(), policy_.accept_probs().end());
    size_t next = 0;
    for (int32_t r = 0; r < p_.num_rows; ++r) {
      for (; next < free_chains_.size() && free_chains_[next].row == r; ++next) chains_.push_back(free_chains_[next]);
      const int32_t count = std::min(num_drafts, p_.max_draft_len[r]);
      if (count <= 0) continue;
      askable_.push_back(r);
      chains_.push_back({r, p_.source, static_cast<int32_t>(accept_probs_.size()), count});
      double accept_prob = 1.0;
      for (int32_t i = 0; i < count; ++i)
        accept_probs_.push_back(accept_prob *= accept_priors_[static_cast<size_t>(r)]);
    }
  }

  // Below this the next pass costs a row more than it brings: its part of the pass, and its draft's part of the step.
  double LeastAcceptance(double rate, const std::vector<int32_t>& takers) const {
    const DraftTimes times(p_.times, p_.max_num_chosen);
    const auto count = static_cast<double>(takers.size());
    double accept_prior = 0.0;
    for (const int32_t r : takers) accept_prior += accept_priors_[static_cast<size_t>(r)] / count;
    const int32_t usual = std::min(times.most(), static_cast<int32_t>(takers.size()));
    const double draft_time = usual == 0 ? 0.0 : (times[usual] - times[0]) / usual;
    const double needed = rate * (p_.call.per_pass / count + p_.call.per_pass_row + draft_time) / accept_prior;
    return std::min(needed, static_cast<double>(kMostAcceptance));
  }

  const DraftPolicy& policy_;
  const ControllerWantsParams& p_;
  const std::span<const DraftChain> free_chains_;
  const DraftFill::Demand demand_;
  DraftFill fill_;
  std::vector<double> accept_priors_;  // by row
  std::vector<int32_t> askable_;       // rows
  std::vector<int32_t> takers_;        // rows
  std::vector<DraftChain> chains_;
  std::vector<double> accept_probs_;
};

Error Check(const DraftPolicy& policy, const ControllerWantsParams& p) {
  if (p.source < 0 || p.source >= policy.num_sources()) return "source: expected one of the policy's, got another";
  if (p.max_drafts < 0) return "max_drafts: expected >= 0, got a negative number";
  if (p.num_outputs < 0) return "num_outputs: expected >= 0, got a negative number";
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (!policy.IsBegun(p.table_rows[r])) return "table_rows: expected table rows that were begun, got another";
    if (!(p.catch_up[r] >= 0)) return "catch_up: expected times >= 0, got others";
  }
  for (const double time : {p.call.first, p.call.per_row, p.call.per_pass, p.call.per_pass_row})
    if (!(time >= 0) || std::isinf(time)) return "call: expected finite times >= 0, got others";
  if (!(p.min_acceptance_prior >= 0 && p.min_acceptance_prior < 1))
    return "min_acceptance_prior: expected a number in [0, 1), got another";
  if (p.times.num_step_rows < 0 || p.times.num_times <= p.times.num_step_rows || p.max_num_chosen < 0)
    return "times: expected at least one, got none";
  return DraftTimes(p.times, p.max_num_chosen).Check();
}

}  // namespace

Error DraftWants(const DraftPolicy& policy, const ControllerWantsParams& p) {
  if (Error error = Check(policy, p)) return error;
  return Wants(policy, p).Run();
}

}  // namespace fdsd
