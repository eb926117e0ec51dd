#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fdsd/runtime.h"

namespace fdsd {
namespace {

// A worker spins this long for the next job before it sleeps: longer than the gap between two ops of a step.
constexpr int kSpinRounds = 20000;

void FutexWait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

thread_local bool in_task = false;

// One job at a time. `claim_` holds (generation << 32 | next task): a thread takes a task by advancing it, so a thread
// that comes late, or was preempted since it looked, takes nothing from another job. Run() returns when every task is
// done, not when every worker has answered: a worker the system does not run costs nothing.
class ThreadPool {
 public:
  explicit ThreadPool(int32_t num_threads) : num_workers_(num_threads - 1) {
    for (int32_t t = 0; t < num_workers_; ++t) workers_.emplace_back([this] { Work(); });
  }

  ~ThreadPool() {
    quit_.store(true);
    Publish();
    for (auto& worker : workers_) worker.join();
  }

  int32_t num_threads() const { return num_workers_ + 1; }

  void Run(int64_t num_tasks, void (*body)(void*, int64_t), void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Nobody may take a task while the job's fields change.
    const uint64_t generation = (claim_.load(std::memory_order_relaxed) >> 32) + 1;
    claim_.store(generation << 32 | kClosed, std::memory_order_seq_cst);
    body_.store(body, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    num_tasks_.store(num_tasks, std::memory_order_release);
    num_done_.store(0, std::memory_order_relaxed);
    claim_.store(generation << 32, std::memory_order_release);
    Publish();
    Drain();
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tasks; ++spins) {
      // More threads than processors: let a preempted worker finish its task instead of burning the time slice.
      if (spins < kSpinRounds) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr uint64_t kClosed = 0xffffffffu;

  void Publish() {
    wake_.fetch_add(1, std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst) > 0) FutexWakeAll(&wake_);
  }

  void Drain() {
    in_task = true;
    int64_t num_run = 0;
    uint64_t claim = claim_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t i = static_cast<int64_t>(claim & kClosed);
      auto* const body = body_.load(std::memory_order_acquire);
      void* const context = context_.load(std::memory_order_acquire);
      if (i >= num_tasks_.load(std::memory_order_acquire) || i == static_cast<int64_t>(kClosed)) break;
      // Whoever saw a newer job's field also sees that the old claim is gone: success means that all are of one job.
      // On failure `claim` is the newer state.
      if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      body(context, i);
      ++num_run;
      claim = claim_.load(std::memory_order_acquire);
    }
    if (num_run > 0) num_done_.fetch_add(num_run, std::memory_order_release);
    in_task = false;
  }

  void Work() {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; wake_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kSpinRounds) {
          _mm_pause();
          continue;
        }
        num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
        FutexWait(&wake_, seen);
        num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = wake_.load(std::memory_order_acquire);
      if (quit_.load()) return;
      Drain();
    }
  }

  const int32_t num_workers_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  // What a worker needs to start lies in the one line it spins on.
  alignas(64) std::atomic<uint64_t> claim_{0};
  std::atomic<void (*)(void*, int64_t)> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> num_tasks_{0};
  std::atomic<uint32_t> wake_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> quit_{false};
};

int32_t AllowedProcessors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::unique_ptr<ThreadPool>& Pool() {
  static std::unique_ptr<ThreadPool> pool = std::make_unique<ThreadPool>(AllowedProcessors());
  return pool;
}

}  // namespace

int32_t NumThreads() { return Pool()->num_threads(); }

Error SetNumThreads(int32_t num_threads) {
  if (num_threads < 1 || num_threads > 1024) return "num_threads: expected 1..1024";
  if (num_threads != NumThreads()) Pool() = std::make_unique<ThreadPool>(num_threads);
  return nullptr;
}

void ParallelForRaw(int64_t num_tasks, void (*body)(void*, int64_t), void* context) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || in_task || NumThreads() == 1) {
    for (int64_t i = 0; i < num_tasks; ++i) body(context, i);
    return;
  }
  Pool()->Run(num_tasks, body, context);
}

void* ScratchBytes(Scratch use, int64_t num_bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<int>(use)];
  if (buffer.size < num_bytes) {
    std::free(buffer.data);
    const int64_t size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, static_cast<size_t>(size));
    if (buffer.data == nullptr) std::abort();
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace fdsd
