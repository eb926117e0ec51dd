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

// One job at a time. A job is published by bumping `generation_`; workers claim tasks from `next_` and report through
// `num_left_`. A worker that wakes late finds no task left and reports at once.
class ThreadPool {
 public:
  explicit ThreadPool(int32_t num_threads) : num_workers_(num_threads - 1) {
    for (int32_t t = 0; t < num_workers_; ++t) workers_.emplace_back([this] { Work(); });
  }

  ~ThreadPool() {
    quit_.store(true);
    generation_.fetch_add(1);
    FutexWakeAll(&generation_);
    for (auto& worker : workers_) worker.join();
  }

  int32_t num_threads() const { return num_workers_ + 1; }

  void Run(int64_t num_tasks, void (*body)(void*, int64_t), void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = body;
    context_ = context;
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    num_left_.store(num_workers_, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst) > 0) FutexWakeAll(&generation_);
    Drain();
    for (int spins = 0; num_left_.load(std::memory_order_acquire) > 0; ++spins) {
      // More threads than processors: let a preempted worker run instead of burning its time slice.
      if (spins < kSpinRounds) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  void Drain() {
    in_task = true;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) body_(context_, i);
    in_task = false;
  }

  void Work() {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kSpinRounds) {
          _mm_pause();
          continue;
        }
        num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
        FutexWait(&generation_, seen);
        num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      // Run() waits for every worker, so no generation is ever skipped.
      ++seen;
      if (quit_.load()) return;
      Drain();
      num_left_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int32_t num_workers_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> num_left_{0};
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

void* ScratchBytes(Scratch slot, int64_t num_bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<int>(slot)];
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
