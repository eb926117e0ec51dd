#include "thread_pool.h"

#include <memory>
#include <mutex>

#include "fdsd/runtime.h"
#include "pool.h"

namespace fdsd {
namespace {

// The threads are started by the first loop that they share.
struct Threads {
  int32_t num_threads = Processors().count();
  int32_t num_processors = num_threads;
  std::once_flag are_started;
  std::unique_ptr<ThreadPool> pool;

  ThreadPool* Pool() {
    std::call_once(are_started, [this] { pool = std::make_unique<ThreadPool>(num_threads, num_processors); });
    return pool.get();
  }
};

std::unique_ptr<Threads>& Current() {
  static std::unique_ptr<Threads> threads = std::make_unique<Threads>();
  return threads;
}

}  // namespace

int32_t NumThreads() { return Current()->num_threads; }

Error SetNumThreads(int32_t num_threads, int32_t num_processors) {
  if (num_threads < 1 || num_threads > 1024) return "num_threads: expected 1..1024";
  if (num_processors < 1) return "num_processors: expected 1 or more";
  Current() = std::make_unique<Threads>();
  Current()->num_threads = num_threads;
  Current()->num_processors = num_processors;
  return nullptr;
}

void ThreadCounts(int64_t* num_jobs, int64_t* of_threads) { Current()->Pool()->Counts(num_jobs, of_threads); }

void ParallelRangesRaw(int64_t count, int64_t grain, LoopBody body, void* context, int64_t unit_bytes) {
  if (count <= 0) return;
  if (count <= grain || in_piece || NumThreads() == 1) return RunGrains(0, count, grain, body, context);
  Current()->Pool()->Run(count, grain, body, context, unit_bytes);
}

}  // namespace fdsd
