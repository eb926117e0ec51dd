#pragma once
// A rank's part in running experts for one another: no rank waits for the steps of another, each runs its experts for
// whatever rows come, at any time. What an op knows of it is a handle.
#include <memory>

#include "expert_home.h"
#include "expert_segment.h"
#include "expert_server.h"

namespace fdsd {

constexpr Error kBadTimeout = "timeout_s: expected a positive number up to 1e6, got another";

inline bool IsTimeout(double timeout_s) { return timeout_s > 0 && timeout_s <= 1e6; }

class ExpertService {
 public:
  ExpertService(const ExpertServiceOpenParams& p, std::unique_ptr<ExpertSegment> segment);

  const ExpertSegment& segment() const { return *segment_; }
  ExpertServer& server() { return server_; }
  ExpertHome& home() { return home_; }

  Error Start();
  Error SetSlot(const ExpertServiceSlotParams& p);
  Error Publish(const ExpertServicePublishParams& p);
  // As what the functions in fdsd/experts.h say.
  Error Meet(double timeout_s);
  Error Leave(double timeout_s);
  bool WaitForOlderJobs(uint64_t version, double timeout_s) const;
  void Close();

 private:
  template <typename IsOver>
  Error WaitForRanks(double timeout_s, const char* what, IsOver&& is_over) const;
  void SetEntry(int32_t layer, int32_t slot, int32_t entry);

  const std::unique_ptr<ExpertSegment> segment_;
  const int32_t rank_;
  ExpertServer server_;
  ExpertHome home_;
};

// nullptr where no open one has the handle.
ExpertService* FindExpertService(int32_t handle);

}  // namespace fdsd
