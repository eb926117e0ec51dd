#pragma once
// One rank's GPU among those that share experts. What ranks tell one another lies in the segment, in memory of the
// host that the GPU reads and writes (cpu/runtime/expert_segment.h). Rows and results lie in the memory of the GPU that
// wants them; the others' GPUs read and write them there.
//
// A pass gives rows and waits for results by itself, in its graph. A thread of the host runs the experts for whatever
// jobs come, on a stream of its own. So a rank serves while its own pass waits.
#include <atomic>
#include <memory>
#include <vector>

#include "device.h"
#include "expert_runner.h"
#include "expert_segment.h"

namespace fdsd::cuda {

// In the GPU's memory. Zeros at first.
struct ExpertState {
  uint64_t seq;      // of the last job
  uint64_t failed;   // not 0: a wait has failed, and until the host clears it no job is published and none waited for
  uint64_t version;  // of the table that the next job is made from, plus 1
  int32_t serving[kMaxExpertRanks];  // when it was begun; see Serving
};

// Of an expert's ranks those are asked that have the highest.
enum class Serving : int32_t { kGone = 0, kLoading = 1, kServing = 2 };

enum class ExpertFailure : uint64_t { kNone = 0, kLate, kGone, kRefused, kNotPublished, kAborted };

// What a GPU tells its host, and the host it, in pinned memory. Checked after a pass, before a result is used.
struct ExpertStatus {
  uint64_t failure;     // ExpertFailure of the first wait that failed since the host cleared it
  uint64_t missing;     // the rank that it waited for
  uint64_t is_aborted;  // not 0: all waits fail, for ever
};

// Words of this many bytes from one rank's to the next one's.
constexpr int64_t kDoneBytes = sizeof(ExpertDone);
constexpr int64_t kRankBytes = sizeof(ExpertRank);

// What kernels need, by the GPU's addresses.
struct ExpertGroup {
  int32_t rank;
  int32_t num_ranks;    // R
  int32_t num_slots;    // S
  int32_t num_experts;  // E
  int32_t capacity;     // rows of a job
  int64_t row_bytes;
  uint64_t timeout_ns;
  // This rank's job.
  uint64_t* seq;
  int32_t* layer;
  int32_t* num_rows;
  int32_t* first_pair;         // [R + 1]
  int32_t* pairs;              // [max_pairs, 3] see ExpertPair
  char* done;                  // by rank, kDoneBytes apart
  const char* states;          // likewise, kRankBytes apart
  const int32_t* is_draining;  // see ExpertRank
  int64_t* counts;             // [L, E]
  // The table: see ExpertSegment.
  const uint64_t* version;
  const int32_t* table;  // [L, R * S]
  uint64_t* job_version;
  char* rows;        // [capacity] of row_bytes
  float* results;    // [max_pairs, H]
  int32_t* pair_of;  // [capacity, top_k] the pair of each row and expert of the job
  // The table as it was last read, by layer.
  uint64_t* read_versions;  // [L] plus 1, 0 = it was not
  int32_t* slot_of;         // [L, E, R] where a rank has an expert, -1 = it has not
  ExpertState* state;
  ExpertStatus* status;
};

// Where rows and results lie, by home.
struct ExpertHomes {
  int32_t capacity;
  int32_t max_pairs;
  int64_t row_bytes;
  int64_t results_at;
  char* memory[kMaxExpertRanks];
};

// What a rank takes of its GPU's memory, in bytes, besides its experts.
struct ExpertGpuBytes {
  int64_t results_at;  // after the rows
  int64_t shared;      // that other ranks open: rows and results
  // That no other rank sees, one after another, before the state.
  int64_t pairs;
  int64_t versions;
  int64_t table;

  explicit ExpertGpuBytes(const ExpertServiceShape& shape);
  int64_t of_rank() const { return pairs + versions + table + static_cast<int64_t>(sizeof(ExpertState)); }
};

class ExpertGpu {
 public:
  // Of the workspace in which a layer's experts run.
  static int64_t WorkspaceBytes(const ExpertServiceShape& service, const ExpertShape& layer);
  // `p`: what the service was opened with, and its handle. The calling thread's GPU is the rank's.
  static Error Open(const ExpertServiceOpenParams& p, ExpertStatus* status, std::unique_ptr<ExpertGpu>* gpu);
  ~ExpertGpu();

  const ExpertGroup& group() const { return group_; }
  const ExpertRunner& runner() const { return runner_; }
  Error FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const;

  // For the runner.
  Error AddLayer(const ExpertServiceLayerParams& p);
  bool Reaches(int32_t home);
  Error Run(const RunExpertsParams& p);

 private:
  struct Home {
    int32_t incarnation = 0;  // whose memory is open, 0 = none
    char* memory = nullptr;
  };
  struct Wave;

  ExpertGpu(const ExpertServiceOpenParams& p, std::unique_ptr<ExpertSegment> segment);
  Error OpenSegment(ExpertStatus* status);
  Error LoadKernels(const ExpertShape& shape);
  ExpertHomes HomesNow() const;
  Error RunWave(const RunExpertsParams& p, const ExpertWeights& weights, int32_t begin, int32_t end);
  int32_t most_pairs() const { return segment_->max_pairs(); }  // that are run at once

  const std::unique_ptr<ExpertSegment> segment_;
  const int32_t rank_;
  const ExpertGpuBytes bytes_;
  const ExpertRunner runner_;
  int device_ = 0;
  ExpertGroup group_{};
  std::vector<ExpertServiceLayerParams> layers_;  // num_experts 0 = was not added
  std::vector<Home> homes_;                       // by rank
  // Of earlier incarnations: closing memory waits for the whole GPU, which waits for other ranks.
  std::vector<char*> retired_;
  char* own_ = nullptr;      // rows and results, which others open
  char* private_ = nullptr;  // what no other rank sees
  bool is_registered_ = false;
  cudaStream_t stream_ = nullptr;
  char* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  int32_t* staging_ = nullptr;     // pinned
  std::vector<int32_t> place_of_;  // [R * capacity] of a row among those that a wave reads, -1 = it does not
};

// The one of a service's handle; nullptr where the service runs on no GPU.
ExpertGpu* FindExpertGpu(int32_t service);

}  // namespace fdsd::cuda
