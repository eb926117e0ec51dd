#include "bandwidth.h"

#include <emmintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "fdsd/runtime.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

using Clock = std::chrono::steady_clock;

// One task's share of a pass: large enough to hide the cost of claiming it, small enough to balance the threads.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int32_t kRoundTrips = 1000;
constexpr std::chrono::milliseconds kPingPongPatience{50};

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Sum of a chunk. Eight independent accumulators: the additions must not be slower than the loads.
int64_t SumChunk(const char* data) {
  constexpr int kLanes = 8;
  __m128i sums[kLanes] = {};
  for (int64_t i = 0; i < kChunkBytes; i += kLanes * 16) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto* address = reinterpret_cast<const __m128i*>(data + i + lane * 16);
      sums[lane] = _mm_add_epi64(sums[lane], _mm_load_si128(address));
    }
  }
  for (int lane = 1; lane < kLanes; ++lane) sums[0] = _mm_add_epi64(sums[0], sums[lane]);
  return _mm_cvtsi128_si64(_mm_add_epi64(sums[0], _mm_unpackhi_epi64(sums[0], sums[0])));
}

// Two threads take turns at a counter: `side` moves it on from its own values, 0, 2, 4.. or 1, 3, 5..
// Returns false when the other side does not answer in time; it is then told to give up too.
bool TakeTurns(std::atomic<int32_t>* turn, int32_t side) {
  constexpr int32_t kGivenUp = -1;
  for (int32_t mine = side; mine < 2 * kRoundTrips; mine += 2) {
    const auto deadline = Clock::now() + kPingPongPatience;
    for (uint32_t spins = 1; turn->load(std::memory_order_acquire) != mine; ++spins) {
      if (spins % 65536 != 0) continue;
      if (turn->load() == kGivenUp || Clock::now() > deadline) {
        turn->store(kGivenUp);
        return false;
      }
    }
    turn->store(mine + 1, std::memory_order_release);
  }
  return true;
}

}  // namespace

double ReadBandwidth(int64_t num_bytes, int32_t num_passes) {
  const int64_t num_chunks = num_bytes / kChunkBytes;
  if (num_chunks < 1 || num_passes < 1) return 0.0;
  const auto size = static_cast<size_t>(num_chunks * kChunkBytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0.0;
  madvise(memory, size, MADV_HUGEPAGE);
  auto* data = static_cast<char*>(memory);
  // Written once, or every page would be the kernel's one page of zeros, which stays in the cache.
  ParallelFor(num_chunks, [&](int64_t chunk) {
    char* begin = data + chunk * kChunkBytes;
    std::fill(begin, begin + kChunkBytes, static_cast<char>(chunk + 1));
  });
  double best_s = 0.0;
  std::atomic<int64_t> sum{0};  // its address leaves this file, so the reads cannot be optimised away
  for (int32_t pass = 0; pass < num_passes; ++pass) {
    const auto start = Clock::now();
    ParallelFor(num_chunks, [&](int64_t chunk) { sum.fetch_add(SumChunk(data + chunk * kChunkBytes)); });
    const double elapsed_s = SecondsSince(start);
    if (pass == 0 || elapsed_s < best_s) best_s = elapsed_s;
  }
  munmap(memory, size);
  return static_cast<double>(size) / best_s;
}

double CoreLatency(int32_t num_passes) {
  if (NumThreads() < 2) return 0.0;
  double best_s = 0.0;
  for (int32_t pass = 0; pass < num_passes; ++pass) {
    alignas(64) std::atomic<int32_t> turn{0};
    std::atomic<bool> has_finished{true};
    // Side 0 sends first and measures; the task that starts later is waited for before the clock starts.
    std::atomic<int32_t> num_ready{0};
    double elapsed_s = 0.0;
    ParallelFor(2, [&](int64_t side) {
      num_ready.fetch_add(1);
      const auto deadline = Clock::now() + kPingPongPatience;
      while (num_ready.load() < 2 && Clock::now() < deadline) _mm_pause();
      const auto start = Clock::now();
      if (!TakeTurns(&turn, static_cast<int32_t>(side))) has_finished = false;
      if (side == 0) elapsed_s = SecondsSince(start);
    });
    const double one_way_s = elapsed_s / (2 * kRoundTrips);
    if (has_finished && (best_s == 0.0 || one_way_s < best_s)) best_s = one_way_s;
  }
  return best_s;
}

}  // namespace fdsd
