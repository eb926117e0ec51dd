#include "expert_service.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "communicator.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

constexpr int32_t kMaxServices = 256;
constexpr Error kNotOpen = "service: expected the handle of an open expert service, got another";
constexpr Error kBadTimeout = "timeout_s: expected a positive number up to 1e6, got another";
constexpr int64_t kLookNs = 1'000'000;

std::atomic<ExpertService*> services[kMaxServices];

bool IsTimeout(double timeout_s) { return timeout_s > 0 && timeout_s <= 1e6; }

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

template <typename Body>
Error WithService(int32_t handle, Body&& body) {
  ExpertService* const service = FindExpertService(handle);
  return service == nullptr ? kNotOpen : body(*service);
}

}  // namespace

ExpertService* FindExpertService(int32_t handle) {
  return handle >= 1 && handle <= kMaxServices ? services[handle - 1].load(std::memory_order_acquire) : nullptr;
}

ExpertExchange* FindExpertExchange(int32_t handle) {
  ExpertService* const service = FindExpertService(handle);
  return service == nullptr ? nullptr : &service->home();
}

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
  segment_->job(rank_).version.store(0);
}

void ExpertService::SetPublished(int32_t layer, int32_t slot, int32_t expert) {
  segment_->slots(layer)[rank_ * segment_->shape().num_slots + slot].store(expert + 1, std::memory_order_seq_cst);
  segment_->version().fetch_add(1, std::memory_order_seq_cst);
}

Error ExpertService::Start() {
  const ExpertServiceShape& s = segment_->shape();
  for (int32_t layer = 0; layer < s.num_layers; ++layer) {
    for (int32_t slot = 0; slot < s.num_slots; ++slot) {
      int32_t expert = -1;
      if (const Error error = server_.FindSlot(layer, slot, &expert)) return error;
      SetPublished(layer, slot, expert);
    }
  }
  server_.Start();
  segment_->rank(rank_).SetState(ExpertRankState::kServing);
  return nullptr;
}

Error ExpertService::Publish(const ExpertServicePublishParams& p) {
  int32_t expert = -1;
  if (const Error error = server_.FindSlot(p.layer, p.slot, &expert)) return error;
  if (p.is_published != 0 && expert < 0) return "slot: expected one that has an expert, got an empty one";
  SetPublished(p.layer, p.slot, p.is_published != 0 ? expert : -1);
  *p.version = static_cast<int64_t>(segment_->version().load());
  return nullptr;
}

template <typename IsOver>
Error ExpertService::WaitForRanks(double timeout_s, const char* what, IsOver&& is_over) const {
  if (!IsTimeout(timeout_s)) return kBadTimeout;
  for (int32_t r = 0; r < segment_->shape().num_ranks; ++r) {
    const auto may_go_on = [&] { return r == rank_ || is_over(segment_->rank(r).State()) || server_.is_aborted(); };
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
  const Error error = WaitForRanks(timeout_s, "has not left in time", [](ExpertRankState state) {
    return state == ExpertRankState::kLeaving || state == ExpertRankState::kGone;
  });
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

Error ExpertServiceBytes(const ExpertServiceBytesParams& p) {
  if (const Error error = ExpertSegment::Check(p.shape)) return error;
  *p.num_bytes = ExpertSegment::NumBytes(p.shape);
  return nullptr;
}

Error ExpertServiceOpen(const ExpertServiceOpenParams& p) {
  std::unique_ptr<ExpertSegment> segment;
  if (!IsTimeout(p.timeout_s)) return kBadTimeout;
  if (const Error error = ExpertSegment::Open(p.file, p.shape, &segment)) return error;
  if (p.rank < 0 || p.rank >= p.shape.num_ranks) return "rank: expected one of the shape's, got another";
  auto service = std::make_unique<ExpertService>(p, std::move(segment));
  for (*p.service = 1; *p.service <= kMaxServices; ++*p.service) {
    ExpertService* empty = nullptr;
    if (!services[*p.service - 1].compare_exchange_strong(empty, service.get())) continue;
    service.release();
    return nullptr;
  }
  return "service: expected at most 256 open ones, got one more";
}

Error ExpertServiceLayer(const ExpertServiceLayerParams& p) {
  return WithService(p.service, [&](ExpertService& service) { return service.server().AddLayer(p); });
}

Error ExpertServiceRunner(const ExpertServiceRunnerParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    service.server().SetRunner(static_cast<const ExpertRunner*>(p.runner));
    return nullptr;
  });
}

Error ExpertServiceSlot(const ExpertServiceSlotParams& p) {
  return WithService(p.service, [&](ExpertService& service) {
    return service.server().SetSlot(p.layer, p.slot, p.expert, p.weights);
  });
}

Error ExpertServicePublish(const ExpertServicePublishParams& p) {
  return WithService(p.service, [&](ExpertService& service) { return service.Publish(p); });
}

Error ExpertServicePlacement(const ExpertServicePlacementParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertServiceShape& s = service.segment().shape();
    if (p.layer < 0 || p.layer >= s.num_layers) return "layer: expected a layer of the service, got another";
    for (int32_t i = 0; i < s.num_ranks * s.num_slots; ++i)
      p.experts[i] = service.segment().slots(p.layer)[i].load(std::memory_order_acquire) - 1;
    return nullptr;
  });
}

Error ExpertServiceTarget(const ExpertServiceTargetParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertServiceShape& s = service.segment().shape();
    if (p.layer < 0 || p.layer >= s.num_layers) return "layer: expected a layer of the service, got another";
    std::atomic<int32_t>& version = service.segment().target(p.layer)[0];
    std::atomic<int32_t>* const experts = &version + 1;
    const int32_t count = s.num_ranks * s.num_slots;
    const int32_t before = version.load();
    if (p.is_new != 0) {
      // Who ended while writing has left an odd number.
      version.store(before | 1);
      for (int32_t i = 0; i < count; ++i) experts[i].store(p.experts[i] + 1);
      version.store((before | 1) + 1);
      return nullptr;
    }
    for (int32_t i = 0; i < count; ++i) p.experts[i] = experts[i].load() - 1;
    // While it is written there is none: who follows it looks again.
    if (before % 2 != 0 || version.load() != before) std::fill_n(p.experts, count, -1);
    return nullptr;
  });
}

Error ExpertServiceCounts(const ExpertServiceCountsParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertServiceShape& s = service.segment().shape();
    if (p.rows != nullptr) std::fill_n(p.rows, int64_t{s.num_layers} * s.num_experts, 0);
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      for (int32_t layer = 0; layer < s.num_layers; ++layer) {
        const std::atomic<int64_t>& served = service.segment().served(r)[layer];
        if (p.served != nullptr) p.served[int64_t{r} * s.num_layers + layer] = served.load(std::memory_order_relaxed);
        if (p.rows == nullptr) continue;
        const std::atomic<int64_t>* const counts = service.segment().counts(r, layer);
        int64_t* const rows = p.rows + int64_t{layer} * s.num_experts;
        for (int32_t e = 0; e < s.num_experts; ++e) rows[e] += counts[e].load(std::memory_order_relaxed);
      }
    }
    return nullptr;
  });
}

Error ExpertServiceOlderJobs(const ExpertServiceOlderJobsParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    if (!IsTimeout(p.timeout_s)) return kBadTimeout;
    *p.is_over = service.WaitForOlderJobs(static_cast<uint64_t>(p.version), p.timeout_s);
    return nullptr;
  });
}

Error ExpertServiceRanks(const ExpertServiceRanksParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    for (int32_t r = 0; r < service.segment().shape().num_ranks; ++r) {
      p.states[r] = static_cast<int32_t>(service.segment().rank(r).State());
      p.incarnations[r] = service.segment().rank(r).incarnation.load();
    }
    *p.is_lost = service.home().is_lost();
    return nullptr;
  });
}

Error ExpertServiceAwaited(const ExpertServiceAwaitedParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertSegment& segment = service.segment();
    const int32_t num_ranks = segment.shape().num_ranks;
    for (int32_t home = 0; home < num_ranks; ++home)
      for (int32_t r = 0; r < num_ranks; ++r)
        p.is_awaited[home * num_ranks + r] = segment.job(home).IsAwaited(r) ? 1 : 0;
    return nullptr;
  });
}

Error ExpertServiceGone(const ExpertServiceGoneParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertSegment& segment = service.segment();
    if (p.rank < 0 || p.rank >= segment.shape().num_ranks) return "rank: expected one of the shape's, got another";
    segment.rank(p.rank).SetState(ExpertRankState::kGone);
    for (int32_t r = 0; r < segment.shape().num_ranks; ++r) SharedWakeAll(&segment.rank(r).wake);
    return nullptr;
  });
}

Error ExpertServiceStart(const ExpertServiceWaitParams& p) {
  return WithService(p.service, [&](ExpertService& service) { return service.Start(); });
}

Error ExpertServiceMeet(const ExpertServiceWaitParams& p) {
  return WithService(p.service, [&](ExpertService& service) { return service.Meet(p.timeout_s); });
}

Error ExpertServiceLeave(const ExpertServiceWaitParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    if (!IsTimeout(p.timeout_s)) return kBadTimeout;
    return service.Leave(p.timeout_s);
  });
}

Error ExpertServiceAbort(const ExpertServiceWaitParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    service.server().Abort();
    return nullptr;
  });
}

Error ExpertServiceClose(const ExpertServiceWaitParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    services[p.service - 1].store(nullptr);
    service.Close();
    delete &service;
    return nullptr;
  });
}

}  // namespace fdsd
