#include "expert_service.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "communicator.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

constexpr int64_t kLookNs = 1'000'000;

// Look once a millisecond. Returns whether it was over in time; time in which this process is stopped does not count.
template <typename IsOver>
bool LookUntil(double timeout_s, IsOver&& is_over) {
  for (int64_t left = static_cast<int64_t>(timeout_s * 1e9); left > 0;) {
    if (is_over()) return true;
    const int64_t before = MonotonicNs();
    const timespec nap{0, kLookNs};
    nanosleep(&nap, nullptr);
    left -= std::min(MonotonicNs() - before, kNapNanoseconds);
  }
  return is_over();
}

}  // namespace

ExpertService::ExpertService(const ExpertServiceOpenParams& p, std::unique_ptr<ExpertSegment> segment)
    : segment_(std::move(segment)),
      rank_(p.rank),
      server_(*segment_, p.rank),
      home_(*segment_, &server_, p.rank, p.timeout_s) {
  ExpertRank& own = segment_->rank(rank_);
  own.SetState(ExpertRankState::kLoading);
  own.incarnation.fetch_add(1);
  own.memory_incarnation.store(0);
  own.asleep.store(0);
  own.next_layer.store(0);
  own.pass_end.store(0);
  own.is_draining.store(0);
  segment_->job(rank_).version.store(0);
}

// Of the table.
void ExpertService::SetEntry(int32_t layer, int32_t slot, int32_t entry) {
  segment_->slots(layer)[rank_ * segment_->shape().num_slots + slot].store(entry, std::memory_order_seq_cst);
  segment_->version().fetch_add(1, std::memory_order_seq_cst);
}

Error ExpertService::Start() {
  const ExpertServiceShape& s = segment_->shape();
  for (int32_t layer = 0; layer < s.num_layers; ++layer) {
    for (int32_t slot = 0; slot < s.num_slots; ++slot) {
      int32_t expert = -1;
      if (const Error error = server_.FindSlot(layer, slot, &expert)) return error;
      SetEntry(layer, slot, expert + 1);
    }
  }
  server_.Start();
  segment_->rank(rank_).SetState(ExpertRankState::kServing);
  return nullptr;
}

Error ExpertService::SetSlot(const ExpertServiceSlotParams& p) {
  if (const Error error = server_.SetSlot(p.layer, p.slot, p.expert, p.weights)) return error;
  if (p.expert < 0) SetEntry(p.layer, p.slot, 0);
  return nullptr;
}

Error ExpertService::Publish(const ExpertServicePublishParams& p) {
  int32_t expert = -1;
  if (const Error error = server_.FindSlot(p.layer, p.slot, &expert)) return error;
  if (p.is_published != 0 && expert < 0) return "slot: expected one that has an expert, got an empty one";
  SetEntry(p.layer, p.slot, p.is_published != 0 ? expert + 1 : -(expert + 1));
  *p.version = static_cast<int64_t>(segment_->version().load());
  return nullptr;
}

template <typename IsOver>
Error ExpertService::WaitForRanks(double timeout_s, const char* what, IsOver&& is_over) const {
  if (!IsTimeout(timeout_s)) return kBadTimeout;
  for (int32_t r = 0; r < segment_->shape().num_ranks; ++r) {
    const auto may_go_on = [&] { return r == rank_ || is_over(segment_->LiveState(r)) || server_.is_aborted(); };
    if (!LookUntil(timeout_s, may_go_on)) return RankError(r, what);
  }
  return server_.is_aborted() ? "the expert service was aborted" : nullptr;
}

Error ExpertService::Meet(double timeout_s) {
  return WaitForRanks(timeout_s, "does not serve its experts in time", [](ExpertRankState state) {
    return state == ExpertRankState::kServing || state == ExpertRankState::kLeaving || state == ExpertRankState::kGone;
  });
}

Error ExpertService::Leave(double timeout_s) {
  segment_->rank(rank_).SetState(ExpertRankState::kLeaving);
  const Error error = WaitForRanks(timeout_s, "has not left in time",
                                   [](ExpertRankState state) { return state != ExpertRankState::kServing; });
  // A rank that others wait for is not gone: they may leave later, or it comes back.
  if (error == nullptr) segment_->rank(rank_).SetState(ExpertRankState::kGone);
  return error;
}

bool ExpertService::WaitForOlderJobs(uint64_t version, double timeout_s) const {
  for (int32_t r = 0; r < segment_->shape().num_ranks; ++r) {
    const auto is_newer = [&] {
      const uint64_t of_job = segment_->job(r).version.load(std::memory_order_seq_cst);
      return of_job == 0 || of_job > version || segment_->rank(r).State() == ExpertRankState::kGone;
    };
    if (!LookUntil(timeout_s, is_newer)) return false;
  }
  return true;
}

void ExpertService::Close() {
  ExpertRank& own = segment_->rank(rank_);
  if (own.State() != ExpertRankState::kGone) own.SetState(ExpertRankState::kLoading);
}

}  // namespace fdsd
