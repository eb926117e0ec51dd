#pragma once
// Runs this rank's experts for the rows of all ranks, on whichever thread of the process is free for it.
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "expert_runner.h"
#include "expert_segment.h"

namespace fdsd {

// How long a job waits at least for others of its layer.
constexpr int64_t kMinGatherNs = 50'000;

class ExpertServer {
 public:
  ExpertServer(const ExpertSegment& segment, int32_t rank);
  ~ExpertServer();

  // Before any layer.
  void SetRunner(const ExpertRunner* runner) { runner_ = runner; }
  Error AddLayer(const ExpertServiceLayerParams& p);
  // The layer as it was added; an error where it was not, or the slot is none of this rank's.
  Error FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const;
  Error SetSlot(int32_t layer, int32_t slot, int32_t expert, const ExpertWeights& weights);
  // The expert in a slot, -1 = none.
  Error FindSlot(int32_t layer, int32_t slot, int32_t* expert);

  // Serve from now on, in a thread of its own whenever no other thread does.
  void Start();
  void Abort();
  bool is_aborted() const { return is_aborted_.load(std::memory_order_relaxed); }

  // Serve until `is_over()`, on the calling thread; one at a time. Returns false where it was aborted, or for so long
  // nothing was over: `left` goes down meanwhile. Time in which this process is stopped does not count.
  // `nap` is how long it sleeps at most before it looks again.
  bool ServeUntil(int64_t* left, int64_t nap, const std::function<bool()>& is_over);

 private:
  struct Layer {
    ExpertServiceLayerParams params{};  // num_experts 0 = was not added
    std::vector<ExpertWeights> weights;
    std::vector<int32_t> experts;  // in each slot, -1 = none
    int64_t last_run = 0;          // how long its experts last took, in nanoseconds
  };
  // A job of a rank that has pairs for this one.
  struct Seen {
    uint64_t seq = 0;
    int64_t since = 0;
    bool is_waiting = false;
  };
  struct Taken {
    int32_t rank;
    uint64_t seq;
    bool is_refused;
  };
  enum class Served { kNothing, kJobs, kLater, kBusy };

  Error CheckLayer(const ExpertServiceLayerParams& p) const;
  bool IsWaiting(int32_t rank) const;
  bool HasJobs() const;
  void Look();
  bool IsGathered(int32_t layer, int64_t wait) const;
  int32_t ChooseJob(int64_t* later);
  bool CanTake(const Layer& layer, int32_t rank) const;
  int32_t TakeJobs(int32_t layer);
  Error RunPairs(const Layer& layer, int32_t num_pairs);
  void RunJobs(int32_t layer);
  Served TryServe(int64_t* later);
  void Sleep(uint32_t thread, int64_t nanoseconds, const std::function<bool()>& is_over);
  void Prepare();
  int64_t IdleNap(int64_t since) const;
  void Work();

  const ExpertSegment& segment_;
  const int32_t rank_;
  ExpertRank& own_;
  const ExpertRunner* runner_ = nullptr;  // nullptr: experts run on the processor
  std::thread thread_;
  std::atomic<bool> quit_{false};
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_caller_serving_{false};  // a thread is in ServeUntil
  std::atomic<bool> is_busy_{false};            // a thread looks for jobs, or runs them

  std::mutex mutex_;  // of all below
  std::vector<Layer> layers_;
  std::vector<Seen> seen_;
  std::vector<Taken> taken_;
  // Of the jobs that are run: see RunExpertsParams.
  std::vector<int32_t> first_pair_;
  std::vector<int32_t> next_pair_;
  std::vector<int32_t> x_rows_;
  std::vector<int32_t> y_rows_;
};

}  // namespace fdsd
