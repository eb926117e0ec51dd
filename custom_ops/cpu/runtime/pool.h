#pragma once
// A loop on many threads: told through few cache lines, shared by stealing, and ended without asking those that did
// nothing.
//
// Threads belong to groups of eight, neighbours by number. The calling thread, number 0, writes a job into one line per
// group, on which that group spins or sleeps. A line per thread (Stretch) tells which pieces are left; at best only its
// owner touches it. A line per group tells how many are done. So with N threads no line is written by more than eight,
// and the caller writes and reads N / 8.
//
// A call returns when every piece is done, not when every thread has answered. So a thread that the system does not run
// costs nothing, unless it was stopped in the middle of a piece (StoppedThreads).
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <mutex>
#include <thread>
#include <vector>

#include "job.h"
#include "stopped_threads.h"
#include "stretch.h"
#include "thread_counters.h"

namespace fdsd {

// Whether this thread runs a piece: loops inside it stay on it.
inline thread_local bool in_piece = false;

inline void RunGrains(int64_t begin, int64_t end, int64_t grain, LoopBody body, void* context) {
  for (int64_t i = begin; i < end; i += grain) body(context, i, std::min(i + grain, end));
}

class ThreadPool {
 public:
  ThreadPool(int32_t num_threads, int32_t num_processors)
      : num_threads_(num_threads),
        stopped_(num_threads),
        num_processors_(num_processors),
        is_crowded_(num_threads > num_processors_),
        groups_(static_cast<size_t>((num_threads + kGroupSize - 1) / kGroupSize)),
        stretches_(static_cast<size_t>(num_threads)),
        counters_(static_cast<size_t>(num_threads)) {
    for (int32_t t = 1; t < num_threads; ++t) workers_.emplace_back([this, t] { Work(t); });
  }

  ~ThreadPool() {
    quit_.store(true);
    Publish(NextJob(num_threads_, 1, nullptr, nullptr, 0));
    for (auto& worker : workers_) worker.join();
  }

  void Run(int64_t count, int64_t grain, LoopBody body, void* context, int64_t unit_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Job job = NextJob(count, grain, body, context, unit_bytes);
    num_jobs_.Add(1);
    Publish(job);
    in_piece = true;
    uint64_t own = Drain(job, 0);
    num_pieces_ += job.num_pieces();
    uint64_t begin = __rdtsc();
    const uint64_t max_ticks = is_crowded_ ? kCrowdedTicks : kWaitTicks;
    for (uint32_t spins = 1; num_own_ + own + NumDone() != num_pieces_; ++spins) {
      // Also what a thread took from another before the system stopped it.
      if (spins % kSpinsPerScan == 0) own += Steal(job, 0, 0, NumGroups(job), true);
      if (__rdtsc() - begin < max_ticks) {
        _mm_pause();
        continue;
      }
      if (is_crowded_ || stopped_.Move(job.number, job.num_threads, &counters_)) Await(own);
      begin = __rdtsc();
    }
    num_own_ += own;
    in_piece = false;
    stopped_.MoveBack(job.number);
  }

  void Counts(int64_t* num_jobs, int64_t* of_threads) const {
    *num_jobs = num_jobs_.value();
    for (const ThreadCounters& c : counters_)
      for (const Counter* counter : {&c.pieces, &c.stolen, &c.bytes, &c.moves, &c.sleeps})
        *of_threads++ = counter->value();
  }

 private:
  static constexpr int32_t kGroupSize = 8;
  static constexpr uint32_t kJobNumbers = 1u << 31;
  // After so many jobs the parts of all threads are marked, also those of threads that had none for as long.
  static constexpr uint32_t kMarkInterval = 1u << 16;

  // In ticks of the processor's clock, 2-4 per nanosecond.
  // A thread spins this long for its next job before it sleeps: longer than what lies between two ops or two steps.
  static constexpr uint64_t kIdleTicks = 1'000'000;
  // The caller spins this long for pieces that others have not ended.
  static constexpr uint64_t kWaitTicks = 100'000;
  // More threads than processors: spinning takes the time from the thread that is waited for.
  static constexpr uint64_t kCrowdedTicks = 5'000;
  static constexpr uint32_t kSpinsPerScan = 64;

  struct Group {
    JobLine job;
    alignas(64) std::atomic<uint64_t> num_done{0};  // pieces of all jobs so far
    alignas(64) std::atomic<uint32_t> drained{0};   // the last job of which a member found nothing left in the group
    alignas(64) std::atomic<int32_t> num_sleeping{0};
  };

  Job NextJob(int64_t count, int64_t grain, LoopBody body, void* context, int64_t unit_bytes) {
    const uint32_t last = number_;
    number_ = (number_ + 1) % kJobNumbers;
    if (number_ % kMarkInterval == 0)
      for (Stretch& stretch : stretches_) stretch.Mark(last);
    const int64_t num_grains = (count + grain - 1) / grain;
    const int64_t grains_per_piece = (num_grains + Stretch::kMaxPieces - 1) / Stretch::kMaxPieces;
    Job job{number_, 0, body, context, count, grain, grains_per_piece, unit_bytes};
    job.num_threads = static_cast<int32_t>(std::min<int64_t>(num_threads_, job.num_pieces()));
    return job;
  }

  int32_t NumGroups(const Job& job) const { return (job.num_threads + kGroupSize - 1) / kGroupSize; }

  void Publish(const Job& job) {
    for (int32_t g = 0; g < NumGroups(job); ++g) groups_[g].job.Write(job);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int32_t g = 0; g < NumGroups(job); ++g) {
      if (groups_[g].num_sleeping.load(std::memory_order_relaxed) == 0) continue;
      // No more than can run; else the first of another group that wakes calls the rest.
      if (is_crowded_ && g > 0 && !quit_.load(std::memory_order_relaxed)) break;
      FutexWake(groups_[g].job.sequence(), g > 0 ? 1 : is_crowded_ ? num_processors_ : INT_MAX);
    }
  }

  uint64_t NumDone() const {
    uint64_t sum = 0;
    for (const Group& group : groups_) sum += group.num_done.load(std::memory_order_acquire);
    return sum;
  }

  // Sleep until a thread has ended its pieces.
  void Await(uint64_t own) {
    const uint32_t seen = ended_.load(std::memory_order_relaxed);
    is_awaited_.store(true, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (num_own_ + own + NumDone() != num_pieces_) {
      counters_[0].sleeps.Add(1);
      FutexWait(&ended_, seen);
    }
    is_awaited_.store(false, std::memory_order_relaxed);
  }

  Pieces Whole(const Job& job, int32_t thread) const {
    const uint64_t pieces = job.num_pieces();
    const auto n = static_cast<uint64_t>(job.num_threads);
    const auto t = static_cast<uint64_t>(thread);
    return {static_cast<uint32_t>(pieces * t / n), static_cast<uint32_t>(pieces * (t + 1) / n)};
  }

  void RunPiece(const Job& job, uint32_t piece, ThreadCounters* counters) const {
    const int64_t begin = piece * job.piece_size();
    const int64_t end = std::min(begin + job.piece_size(), job.count);
    RunGrains(begin, end, job.grain, job.body, job.context);
    counters->pieces.Add(1);
    counters->bytes.Add((end - begin) * job.unit_bytes);
  }

  // The pieces of the thread's own part that no other thread takes. Returns how many it ran.
  uint64_t RunOwn(const Job& job, int32_t thread) {
    uint64_t num_run = 0;
    for (;;) {
      const Pieces piece = stretches_[thread].TakeFront(job.number, Whole(job, thread));
      if (piece.empty()) return num_run;
      RunPiece(job, piece.begin, &counters_[thread]);
      ++num_run;
      if (stopped_.MustSleep(thread)) return num_run;
    }
  }

  // Run what can be had from the members of groups [begin, end), which may go round. Returns the number of pieces.
  uint64_t Steal(const Job& job, int32_t thread, int32_t begin, int32_t end, bool also_drained) {
    const int32_t num_groups = NumGroups(job);
    uint64_t num_run = 0;
    for (int32_t i = begin; i < end; ++i) {
      const int32_t g = i % num_groups;
      if (!also_drained && groups_[g].drained.load(std::memory_order_relaxed) == job.number) continue;
      const int32_t first = g * kGroupSize;
      const int32_t size = std::min(kGroupSize, job.num_threads - first);
      for (int32_t k = 1; k <= size; ++k) {
        const int32_t victim = first + (thread + k) % size;
        if (victim == thread) continue;
        for (;;) {
          const Pieces taken = stretches_[victim].TakeBackHalf(job.number, Whole(job, victim));
          if (taken.empty()) break;
          counters_[thread].stolen.Add(taken.end - taken.begin);
          stretches_[thread].Put(job.number, taken);
          num_run += RunOwn(job, thread);
          if (stopped_.MustSleep(thread)) return num_run;
        }
      }
    }
    return num_run;
  }

  uint64_t Drain(const Job& job, int32_t thread) {
    const int32_t own = thread / kGroupSize;
    uint64_t num_run = RunOwn(job, thread);
    if (stopped_.MustSleep(thread)) return num_run;
    num_run += Steal(job, thread, own, own + 1, true);
    groups_[own].drained.store(job.number, std::memory_order_relaxed);
    return num_run + Steal(job, thread, own + 1, own + NumGroups(job), false);
  }

  // Returns the group's next sequence after `seen`.
  uint32_t NextSequence(Group* group, uint32_t seen, int32_t thread) {
    std::atomic<uint32_t>* const sequence = group->job.sequence();
    const uint64_t begin = __rdtsc();
    const uint64_t max_ticks = is_crowded_ ? kCrowdedTicks : kIdleTicks;
    for (;;) {
      const uint32_t now = sequence->load(std::memory_order_acquire);
      if (now != seen && now % 2 == 0) return now;
      if (now != seen || (__rdtsc() - begin < max_ticks && !stopped_.MustSleep(thread))) {
        _mm_pause();
        continue;
      }
      counters_[thread].sleeps.Add(1);
      group->num_sleeping.fetch_add(1, std::memory_order_seq_cst);
      while (sequence->load(std::memory_order_seq_cst) == seen) FutexWait(sequence, seen);
      const int32_t others = group->num_sleeping.fetch_sub(1, std::memory_order_seq_cst) - 1;
      if (others > 0 && (!is_crowded_ || quit_.load())) FutexWake(sequence, INT_MAX);
    }
  }

  void Work(int32_t thread) {
    in_piece = true;
    Group& group = groups_[thread / kGroupSize];
    for (uint32_t seen = 0;;) {
      seen = NextSequence(&group, seen, thread);
      if (quit_.load()) return;
      Job job;
      if (!group.job.Read(seen, &job) || thread >= job.num_threads) continue;
      stopped_.Begin(thread, job.number);
      const uint64_t num_run = Drain(job, thread);
      stopped_.End(thread);
      if (num_run == 0) continue;
      group.num_done.fetch_add(num_run, std::memory_order_seq_cst);
      if (!is_awaited_.load(std::memory_order_seq_cst)) continue;
      ended_.fetch_add(1, std::memory_order_seq_cst);
      FutexWake(&ended_, 1);
    }
  }

  const int32_t num_threads_;
  StoppedThreads stopped_;
  const int32_t num_processors_;
  const bool is_crowded_;
  std::vector<Group> groups_;
  std::vector<Stretch> stretches_;
  std::vector<ThreadCounters> counters_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  Counter num_jobs_;
  // Of the caller.
  uint32_t number_ = 0;
  uint64_t num_pieces_ = 0;  // of all jobs, this one included
  uint64_t num_own_ = 0;     // of those, run by callers
  alignas(64) std::atomic<bool> is_awaited_{false};
  std::atomic<uint32_t> ended_{0};
  std::atomic<bool> quit_{false};
};

}  // namespace fdsd
