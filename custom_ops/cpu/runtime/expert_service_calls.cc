// The calls of services by their handles.
#include <algorithm>
#include <atomic>
#include <utility>

#include "expert_service.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

constexpr int32_t kMaxServices = 256;
constexpr Error kNotOpen = "service: expected the handle of an open expert service, got another";

std::atomic<ExpertService*> services[kMaxServices];

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
  if (const Error error = segment->Claim(p.rank)) return error;
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
  return WithService(p.service, [&](ExpertService& service) { return service.SetSlot(p); });
}

Error ExpertServicePublish(const ExpertServicePublishParams& p) {
  return WithService(p.service, [&](ExpertService& service) { return service.Publish(p); });
}

Error ExpertServicePlacement(const ExpertServicePlacementParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertServiceShape& s = service.segment().shape();
    if (p.layer < 0 || p.layer >= s.num_layers) return "layer: expected a layer of the service, got another";
    for (int32_t i = 0; i < s.num_ranks * s.num_slots; ++i) {
      const int32_t entry = service.segment().slots(p.layer)[i].load(std::memory_order_acquire);
      p.experts[i] = std::max(entry, p.has_retired != 0 ? -entry : 0) - 1;
    }
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
      p.states[r] = static_cast<int32_t>(service.segment().LiveState(r));
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

Error ExpertServiceDrain(const ExpertServiceDrainParams& p) {
  return WithService(p.service, [&](ExpertService& service) -> Error {
    const ExpertSegment& segment = service.segment();
    if (p.first_rank < 0 || p.num_ranks < 0 || p.first_rank > segment.shape().num_ranks - p.num_ranks)
      return "num_ranks: expected ranks of the shape, got another";
    for (int32_t r = p.first_rank; r < p.first_rank + p.num_ranks; ++r) {
      segment.rank(r).is_draining.store(1);
      SharedWakeAll(&segment.rank(r).wake);
    }
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
