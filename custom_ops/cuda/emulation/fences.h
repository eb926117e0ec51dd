#pragma once
// Fences between proxies (fence.proxy.async). What threads do to shared memory comes before what bulk copies and
// products of a warpgroup do there only with a fence between, in the order that barriers make. Any thread may make it.
#include <cstdint>
#include <vector>

#include "emulation/engine.h"
#include "emulation/shadow.h"

namespace fdsd::emulation {

// Whether what was done before comes before what is done now. `begin`: the period from which on accesses count.
inline bool IsOrdered(const Trace& before, const Trace& now, const ThreadPlace& here, uint32_t begin) {
  if (before.period < begin) return true;
  if (before.period < here.block_begin) return false;
  if (before.thread == now.thread || before.period < now.period) return true;
  return before.warp() == now.warp() && before.warp_period < now.warp_period;
}

// The fences of the block that runs.
class Fences {
 public:
  void Add(const Trace& by) {
    if (by_thread_.size() <= by.thread) by_thread_.resize(by.thread + 1);
    by_thread_[by.thread].push_back({by, count_++});
  }
  void Clear() {
    for (std::vector<Fence>& own : by_thread_) own.clear();
    count_ = 0;
  }
  uint32_t count() const { return count_; }

  // Whether one is between a write, before which there were `num_before`, and now.
  bool HasBetween(const Trace& write, uint32_t num_before, const Trace& now) const {
    // Nearly always of the thread that wrote, or of the one that asks.
    if (HasOf(write.thread, write, num_before, now) || HasOf(now.thread, write, num_before, now)) return true;
    for (uint32_t thread = 0; thread < by_thread_.size(); ++thread) {
      if (HasOf(thread, write, num_before, now)) return true;
    }
    return false;
  }

 private:
  struct Fence {
    Trace by;
    uint32_t num_before;
  };

  bool HasOf(uint32_t thread, const Trace& write, uint32_t num_before, const Trace& now) const {
    if (thread >= by_thread_.size()) return false;
    const ThreadPlace& here = Here();
    const std::vector<Fence>& own = by_thread_[thread];
    for (auto fence = own.rbegin(); fence != own.rend() && fence->num_before >= num_before; ++fence) {
      if (IsOrdered(write, fence->by, here, here.block_begin) && IsOrdered(fence->by, now, here, here.block_begin))
        return true;
    }
    return false;
  }

  std::vector<std::vector<Fence>> by_thread_;
  uint32_t count_ = 0;
};

}  // namespace fdsd::emulation
