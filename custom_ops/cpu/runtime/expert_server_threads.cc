// Which thread serves when, and how it sleeps.
#include <algorithm>

#include "expert_server.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

// How long the thread of an idle rank polls after a job: about as long as another rank needs to its next one.
constexpr int64_t kIdlePollNs = 200'000;
// How often it looks for jobs of GPUs.
constexpr int64_t kMinLookNs = 20'000;
constexpr int64_t kMaxLookNs = 1'000'000;
constexpr int64_t kLooksPerIdleTime = 16;

}  // namespace

void ExpertServer::Start() {
  thread_ = std::thread([this] { Work(); });
}

void ExpertServer::Abort() {
  is_aborted_.store(true);
  SharedWakeAll(&own_.wake);
}

ExpertServer::~ExpertServer() {
  quit_.store(true);
  SharedWakeAll(&own_.wake);
  if (thread_.joinable()) thread_.join();
}

// Sleep until woken, unless it is over. `thread` is its bit, by which others know that they must wake it.
void ExpertServer::Sleep(uint32_t thread, int64_t nanoseconds, const std::function<bool()>& is_over) {
  const uint32_t seen = own_.wake.load(std::memory_order_seq_cst);
  own_.asleep.fetch_or(thread, std::memory_order_seq_cst);
  // In one order with what others publish: either it is seen here, or they see the bit.
  if (!is_over()) SharedNap(&own_.wake, seen, nanoseconds);
  own_.asleep.fetch_and(~thread, std::memory_order_seq_cst);
}

bool ExpertServer::ServeUntil(int64_t* left, int64_t nap, const std::function<bool()>& is_over) {
  if (is_over()) return !is_aborted();
  is_caller_serving_.store(true, std::memory_order_seq_cst);
  own_.asleep.fetch_and(~kThreadAsleep, std::memory_order_seq_cst);
  bool is_done = false;
  for (;;) {
    const int64_t before = MonotonicNs();
    int64_t later = 0;
    const Served served = TryServe(&later);
    const auto has_news = [&] { return is_over() || is_aborted() || (!is_busy_.load() && HasJobs()); };
    if (served == Served::kLater) Poll(later, [&] { return is_over() || is_aborted(); });
    if (served == Served::kNothing || served == Served::kBusy) {
      if (!Poll(std::min(kSpinNanoseconds, *left), has_news) && *left > kSpinNanoseconds) {
        Sleep(kCallerAsleep, std::min(nap, *left), has_news);
      }
    }
    is_done = is_over();
    if (is_done || is_aborted()) break;
    *left -= std::min(MonotonicNs() - before, 2 * kNapNanoseconds);
    if (*left <= 0) break;
  }
  // From here on it is the thread that hears of jobs; it has slept without its bit.
  is_caller_serving_.store(false, std::memory_order_seq_cst);
  own_.asleep.fetch_or(kThreadAsleep, std::memory_order_seq_cst);
  if (HasJobs()) SharedWakeAll(&own_.wake);
  return is_done && !is_aborted();
}

// How long the thread sleeps that has served nothing `since` then. GPUs wake no thread: it looks the more rarely the
// longer it was idle.
int64_t ExpertServer::IdleNap(int64_t since) const {
  if (runner_ == nullptr) return kNapNanoseconds;
  return std::clamp((MonotonicNs() - since) / kLooksPerIdleTime, kMinLookNs, kMaxLookNs);
}

// Open the memory of ranks that load, so that nothing of the kind is left to be done while GPUs wait for one another.
void ExpertServer::Prepare() {
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r) runner_->reaches(runner_->self, r);
}

void ExpertServer::Work() {
  int64_t last_served = MonotonicNs();
  const auto is_caller_serving = [this] { return is_caller_serving_.load(std::memory_order_seq_cst); };
  const auto has_news = [&] { return quit_.load() || (!is_caller_serving() && HasJobs()); };
  while (!quit_.load()) {
    if (is_caller_serving()) {
      const uint32_t seen = own_.wake.load(std::memory_order_seq_cst);
      if (is_caller_serving()) SharedNap(&own_.wake, seen, kNapNanoseconds);
      continue;
    }
    int64_t later = 0;
    const Served served = TryServe(&later);
    if (served == Served::kJobs && own_.next_layer.load(std::memory_order_relaxed) == 0) Poll(kIdlePollNs, has_news);
    if (served == Served::kJobs) {
      last_served = MonotonicNs();
      continue;
    }
    if (served == Served::kLater || served == Served::kBusy) {
      Sleep(0, kMinGatherNs, [] { return false; });
    } else {
      if (runner_ != nullptr) Prepare();
      Sleep(kThreadAsleep, IdleNap(last_served), has_news);
    }
  }
}

}  // namespace fdsd
