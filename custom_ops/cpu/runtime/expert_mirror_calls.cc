// The calls of mirrors by their handles.
#include <mutex>

#include "expert_mirror.h"
#include "fdsd/expert_mirror.h"

namespace fdsd {
namespace {

constexpr int32_t kMaxMirrors = 64;

std::mutex mutex;  // of which are open
std::unique_ptr<ExpertMirror> mirrors[kMaxMirrors];
int32_t hosts[kMaxMirrors];

template <typename Body>
Error WithMirror(int32_t handle, int32_t host, Body&& body) {
  ExpertMirror* mirror = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (handle >= 1 && handle <= kMaxMirrors) mirror = mirrors[handle - 1].get();
    if (mirror == nullptr) return "mirror: expected the handle of an open one, got another";
    if (host < 0 || host >= hosts[handle - 1]) return "host: expected one of the mirror's, got another";
  }
  return body(*mirror);
}

}  // namespace

Error ExpertMirrorOpen(const ExpertMirrorOpenParams& p) {
  *p.mirror = 0;
  ExpertServiceShape shape;
  if (ExpertSegment::FindShape(p.file, &shape) != nullptr) return nullptr;
  std::unique_ptr<ExpertSegment> segment;
  if (const Error error = ExpertSegment::Open(p.file, shape, &segment)) return error;
  if (p.num_hosts < 2 || shape.num_ranks % p.num_hosts != 0) return "num_hosts: expected as many as divide the ranks";
  if (p.host < 0 || p.host >= p.num_hosts) return "host: expected one of num_hosts, got another";
  std::lock_guard<std::mutex> lock(mutex);
  for (int32_t i = 0; i < kMaxMirrors; ++i) {
    if (mirrors[i] != nullptr) continue;
    mirrors[i] = std::make_unique<ExpertMirror>(std::move(segment), p.host, p.num_hosts, p.news);
    hosts[i] = p.num_hosts;
    *p.mirror = i + 1;
    *p.frame_bytes = mirrors[i]->frame_bytes();
    return nullptr;
  }
  return "mirror: expected at most 64 open ones, got one more";
}

Error ExpertMirrorBegin(const ExpertMirrorHostParams& p) {
  return WithMirror(p.mirror, p.host, [&](ExpertMirror& mirror) -> Error {
    mirror.Begin(p.host);
    return nullptr;
  });
}

Error ExpertMirrorLose(const ExpertMirrorHostParams& p) {
  return WithMirror(p.mirror, p.host, [&](ExpertMirror& mirror) -> Error {
    mirror.Lose(p.host);
    return nullptr;
  });
}

Error ExpertMirrorClose(const ExpertMirrorHostParams& p) {
  return WithMirror(p.mirror, p.host, [&](ExpertMirror&) -> Error {
    std::lock_guard<std::mutex> lock(mutex);
    mirrors[p.mirror - 1].reset();
    return nullptr;
  });
}

Error ExpertMirrorCollect(const ExpertMirrorCollectParams& p) {
  return WithMirror(p.mirror, p.host, [&](ExpertMirror& mirror) -> Error {
    *p.num_bytes = mirror.Collect(p.host, static_cast<char*>(p.frame));
    return nullptr;
  });
}

Error ExpertMirrorApply(const ExpertMirrorApplyParams& p) {
  return WithMirror(p.mirror, p.host, [&](ExpertMirror& mirror) {
    return mirror.Apply(p.host, static_cast<const char*>(p.frame), p.num_bytes);
  });
}

}  // namespace fdsd
