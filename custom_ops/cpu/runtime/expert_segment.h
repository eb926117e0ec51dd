#pragma once
// The memory over which ranks share experts, and who may write what of it when.
//
// Each rank has a job: rows that it wants run, as pairs of a row and a slot of another rank, sorted by rank. Only this
// rank writes it, and publishes it by raising `seq`. The ranks that it names write the results and then their `done`
// line. A rank reads a job only while its own `done` is lower than `seq`; before that a job of no concern to it is
// marked done by who writes it. So no rank reads what is being written, also when a process ends anywhere: a job is
// written anew only when all that it named are done or will not come back.
#include <atomic>
#include <cstdint>
#include <memory>

#include "fdsd/experts.h"

namespace fdsd {

struct ExpertPair {
  int32_t row;     // of the job
  int32_t slot;    // of the rank that runs it
  int32_t expert;  // that the slot had
};

// 2 * seq of the last job that one rank has done of another's, 1 more where it sent it back.
struct ExpertDone {
  alignas(64) std::atomic<uint64_t> word;
};

struct ExpertJob {
  alignas(64) std::atomic<uint64_t> seq;  // 0 = none as yet
  int32_t layer;
  int32_t num_rows;
  int32_t first_pair[kMaxExpertRanks + 1];  // those for rank r are first_pair[r] to first_pair[r + 1] - 1
  // The number of the table that it was made from, plus 1; 0 = none is under way.
  alignas(64) std::atomic<uint64_t> version;
  ExpertDone done[kMaxExpertRanks];

  // Whether a rank has still to do it.
  bool IsAwaited(int32_t rank) const {
    return done[rank].word.load(std::memory_order_acquire) / 2 < seq.load(std::memory_order_acquire);
  }
};

// What a rank tells the others besides.
constexpr int64_t kMemoryHandleBytes = 64;
constexpr uint32_t kThreadAsleep = 1;  // the one that serves when no other does: for jobs
constexpr uint32_t kCallerAsleep = 2;  // the one that waits for results: for them, and for jobs
struct ExpertRank {
  alignas(64) std::atomic<uint32_t> wake;
  std::atomic<uint32_t> asleep;  // bits: which of its threads must be woken by `wake`
  alignas(64) std::atomic<int32_t> state;
  std::atomic<int32_t> incarnation;
  alignas(64) std::atomic<int64_t> pass;  // passes begun
  // That the pass will need, plus 1; less than 0: it waits for others before it begins with that one; 0 = in no pass.
  std::atomic<int32_t> next_layer;
  std::atomic<int64_t> pass_end;      // when the last pass ended, 0 = there was none
  std::atomic<int64_t> pass_gap;      // from the end of a pass to the beginning of the next one
  std::atomic<int32_t> is_elsewhere;  // 1: on another host; see expert_mirror.h
  std::atomic<int32_t> is_draining;   // 1: it waits for no rank that is loading
  // Of a rank on a GPU, whose rows and results are in the GPU's memory: a handle of it, and the incarnation that it is
  // of, 0 = there is none.
  std::atomic<int32_t> memory_incarnation;
  char memory[kMemoryHandleBytes];

  ExpertRankState State() const { return static_cast<ExpertRankState>(state.load(std::memory_order_acquire)); }
  void SetState(ExpertRankState value) { state.store(static_cast<int32_t>(value), std::memory_order_seq_cst); }
};

class ExpertSegment {
 public:
  static Error Check(const ExpertServiceShape& shape);
  static int64_t NumBytes(const ExpertServiceShape& shape);
  static int32_t CapacityOf(const ExpertServiceShape& shape);  // rows of a job

  // The shape that the first rank has given to a segment; an error where none has as yet.
  static Error FindShape(int32_t file, ExpertServiceShape* shape);
  // Map the segment; the first that comes sets its size. `file` may be closed afterwards.
  static Error Open(int32_t file, const ExpertServiceShape& shape, std::unique_ptr<ExpertSegment>* segment);
  ~ExpertSegment();

  const ExpertServiceShape& shape() const { return shape_; }
  int32_t capacity() const { return capacity_; }  // rows of a job
  int32_t max_pairs() const { return capacity_ * shape_.top_k; }

  ExpertRank& rank(int32_t rank) const { return At<ExpertRank>(offsets_.ranks)[rank]; }
  // Of the mirror, where ranks are on other hosts.
  ExpertRank& mirror() const { return rank(shape_.num_ranks); }
  // Wake those of a rank's threads that have one of these bits: for a rank of another host, the mirror.
  void Wake(int32_t rank, uint32_t threads) const;
  // Be the process of a rank until this is destroyed, or the process ends; an error where another one is.
  Error Claim(int32_t rank);
  // As its own word says, but that it is loading once its process has ended and it is not gone. Takes a system call.
  ExpertRankState LiveState(int32_t rank) const;
  ExpertJob& job(int32_t rank) const { return At<ExpertJob>(offsets_.jobs)[rank]; }
  ExpertPair* pairs(int32_t rank) const { return At<ExpertPair>(offsets_.pairs) + int64_t{rank} * max_pairs(); }
  std::atomic<int64_t>* counts(int32_t rank, int32_t layer) const {
    return At<std::atomic<int64_t>>(offsets_.counts) + (int64_t{rank} * shape_.num_layers + layer) * shape_.num_experts;
  }
  // [L] the rows that a rank has run its experts on; only it adds.
  std::atomic<int64_t>* served(int32_t rank) const {
    return At<std::atomic<int64_t>>(offsets_.served) + int64_t{rank} * shape_.num_layers;
  }
  // What a GPU reads and writes of it: all but rows and results, which it has in its own memory.
  char* data() const { return data_; }
  int64_t control_bytes() const { return offsets_.rows; }
  // Of all ranks, one after another: [R * capacity] rows of row_bytes, [R * max_pairs, H].
  char* rows() const { return At<char>(offsets_.rows); }
  float* results() const { return At<float>(offsets_.results); }

  // Whether all ranks have done a rank's job, or will not.
  bool IsOver(int32_t rank) const;
  // Begin to write the next job of a rank; returns its number. Those that are gone do nothing of the last one any more.
  uint64_t BeginJob(int32_t rank) const;
  // The job is written: those that it names may read it.
  void PublishJob(int32_t rank) const;

  // The table: [R * S] the published expert of each slot plus 1; less than 0: that of one which only older tables
  // published, and which is still run; 0 = none. Who changes a slot raises the version afterwards; who reads the same
  // version before and after all slots has seen every move whole. A rank that is started again loads all of its own.
  std::atomic<int32_t>* slots(int32_t layer) const {
    return At<std::atomic<int32_t>>(offsets_.slots) + int64_t{layer} * shape_.num_ranks * shape_.num_slots;
  }
  std::atomic<uint64_t>& version() const;

  // [1 + R * S] how often it was written, twice, 1 more while it is; the experts that each rank shall have, plus 1, 0 =
  // none.
  std::atomic<int32_t>* target(int32_t layer) const {
    return At<std::atomic<int32_t>>(offsets_.targets) + layer * (int64_t{1} + shape_.num_ranks * shape_.num_slots);
  }

 private:
  // In bytes, each of whole pages.
  struct Offsets {
    int64_t ranks, jobs, slots, targets, counts, served, pairs, rows, results, end;
  };
  static Offsets OffsetsOf(const ExpertServiceShape& shape);

  ExpertSegment(const ExpertServiceShape& shape, void* data, int32_t file);
  Error Agree() const;
  template <typename T>
  T* At(int64_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

  const ExpertServiceShape shape_;
  const int32_t capacity_;
  const Offsets offsets_;
  char* const data_;
  const int32_t file_;     // opened here: who locks a rank's byte of it is the rank's process
  int32_t own_rank_ = -1;  // that was claimed
};

}  // namespace fdsd
