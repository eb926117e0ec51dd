#pragma once
// Gives a rank's rows to the ranks that have their experts, and takes what comes back.
#include <atomic>
#include <cstdint>
#include <vector>

#include "expert_exchange.h"
#include "expert_segment.h"
#include "expert_server.h"

namespace fdsd {

class ExpertHome final : public ExpertExchange {
 public:
  ExpertHome(const ExpertSegment& segment, ExpertServer* server, int32_t rank, double timeout_s);

  Error FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const override {
    return server_.FindLayer(layer, found);
  }
  int32_t capacity() const override { return segment_.capacity(); }
  // Whether the last call failed because a rank did not run its experts. Any thread may ask.
  bool is_lost() const { return is_lost_.load(std::memory_order_relaxed); }
  Error BeginPass(int32_t layer) override;
  void EndPass() override;
  Error Post(const ExpertRows& rows) override;
  void LeaveLayer(int32_t layer) override;
  Error Await(int32_t layer, int32_t num_rows) override;
  const float* Result(int64_t row, int32_t k) const override {
    return results_ + int64_t{pair_of_[row * top_k_ + k]} * segment_.shape().hidden_size;
  }

 private:
  // The published slots of each expert of a layer, as rank * S + slot.
  struct Replicas {
    uint64_t version = 0;  // of the table, plus 1
    std::vector<int32_t> first;
    std::vector<int32_t> slots;
  };

  bool AwaitsLoading() const;
  int32_t FindGivenUp() const;
  bool ServeUntilOver();
  bool MustRepeat() const;
  Error Failure();
  bool IsAwaited(int32_t rank, int64_t pass_before, int32_t layer) const;
  const Replicas& ReadTable(int32_t layer, int32_t num_experts);
  Error ChooseSlot(const Replicas& replicas, int32_t expert, int64_t row, int32_t* slot);
  Error SortPairs(const Replicas& replicas);
  void Count();
  Error Publish();

  const ExpertSegment& segment_;
  ExpertServer& server_;
  const int32_t rank_;
  const int64_t timeout_;
  ExpertJob& job_;
  const float* const results_;
  ExpertRows rows_{};
  int32_t top_k_ = 0;
  bool is_posted_ = false;
  std::atomic<bool> is_lost_{false};
  int32_t first_layer_ = 0;  // of the pass
  int64_t pass_begin_ = 0;
  std::vector<int64_t> pass_times_;  // by first layer
  std::vector<int64_t> passes_seen_;
  std::vector<Replicas> replicas_;  // by layer
  std::vector<int32_t> slot_of_;    // [rows, top_k] rank * S + slot
  std::vector<int32_t> pair_of_;    // [rows, top_k]
  std::vector<int32_t> next_pair_;  // [R * S]
};

}  // namespace fdsd
