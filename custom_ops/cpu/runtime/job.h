#pragma once
// How threads hear of a job, and how the one that gave it hears that it is done.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "parallel_ranges.h"

namespace fdsd {

inline void FutexWait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void FutexWake(std::atomic<uint32_t>* word, int num_waiters) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, num_waiters, nullptr, nullptr, 0);
}

// A loop: see ParallelRangesRaw. Number 0 is none.
struct Job {
  uint32_t number;
  int32_t num_threads;  // 0.. take part
  LoopBody body;
  void* context;
  int64_t count, grain, grains_per_piece, unit_bytes;

  int64_t piece_size() const { return grain * grains_per_piece; }
  uint32_t num_pieces() const { return static_cast<uint32_t>((count + piece_size() - 1) / piece_size()); }
};

// One job as others read it, in one cache line: a reader takes it as it is and asks afterwards whether it changed
// meanwhile. `sequence` is odd while it does, else twice the job's number.
class alignas(64) JobLine {
 public:
  std::atomic<uint32_t>* sequence() { return &sequence_; }

  void Write(const Job& job) {
    sequence_.store(2 * job.number - 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    num_threads_.store(job.num_threads, std::memory_order_relaxed);
    body_.store(job.body, std::memory_order_relaxed);
    context_.store(job.context, std::memory_order_relaxed);
    count_.store(job.count, std::memory_order_relaxed);
    grain_.store(job.grain, std::memory_order_relaxed);
    grains_per_piece_.store(job.grains_per_piece, std::memory_order_relaxed);
    unit_bytes_.store(job.unit_bytes, std::memory_order_relaxed);
    sequence_.store(2 * job.number, std::memory_order_release);
  }

  // Returns false where the job is not, or no longer, the one that `sequence` names.
  bool Read(uint32_t sequence, Job* job) const {
    if (sequence % 2 != 0) return false;
    job->number = sequence / 2;
    job->num_threads = num_threads_.load(std::memory_order_relaxed);
    job->body = body_.load(std::memory_order_relaxed);
    job->context = context_.load(std::memory_order_relaxed);
    job->count = count_.load(std::memory_order_relaxed);
    job->grain = grain_.load(std::memory_order_relaxed);
    job->grains_per_piece = grains_per_piece_.load(std::memory_order_relaxed);
    job->unit_bytes = unit_bytes_.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    return sequence_.load(std::memory_order_relaxed) == sequence;
  }

 private:
  std::atomic<uint32_t> sequence_{0};
  std::atomic<int32_t> num_threads_{0};
  std::atomic<LoopBody> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, grain_{0}, grains_per_piece_{0}, unit_bytes_{0};
};

}  // namespace fdsd
