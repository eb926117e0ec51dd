#include "parallel_ranges.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "fdsd/runtime.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

struct Piece {
  int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

// What is left of one thread's stretch: its owner takes from the front, others from the back. The same bounds never
// come back, since a piece that was taken is not returned: a successful exchange saw the present state.
class alignas(64) Stretch {
 public:
  explicit Stretch(Piece piece) { Put(piece); }

  // By the owner, when the stretch is empty.
  void Put(Piece piece) { bounds_.store(Pack(piece), std::memory_order_relaxed); }

  Piece TakeFront(int64_t grain) {
    uint64_t seen = bounds_.load(std::memory_order_relaxed);
    for (;;) {
      const Piece left = Unpack(seen);
      const Piece taken{left.begin, std::min(left.begin + grain, left.end)};
      if (left.empty() || Replace(&seen, {taken.end, left.end})) return taken;
    }
  }

  Piece TakeBackHalf() {
    uint64_t seen = bounds_.load(std::memory_order_relaxed);
    for (;;) {
      const Piece left = Unpack(seen);
      const Piece taken{left.end - (left.end - left.begin + 1) / 2, left.end};
      if (left.empty() || Replace(&seen, {left.begin, taken.begin})) return taken;
    }
  }

 private:
  static uint64_t Pack(Piece piece) {
    return static_cast<uint64_t>(piece.begin) << 32 | static_cast<uint64_t>(piece.end);
  }
  static Piece Unpack(uint64_t bounds) {
    return {static_cast<int64_t>(bounds >> 32), static_cast<int64_t>(bounds & 0xffffffffu)};
  }
  bool Replace(uint64_t* seen, Piece left) {
    return bounds_.compare_exchange_weak(*seen, Pack(left), std::memory_order_relaxed);
  }

  std::atomic<uint64_t> bounds_;
};

}  // namespace

void ParallelRangesRaw(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
  if (count <= 0) return;
  const int64_t num_stretches = std::min<int64_t>(NumThreads(), (count + grain - 1) / grain);
  Stretch* stretches = ScratchArray<Stretch>(Scratch::kRanges, num_stretches);
  for (int64_t i = 0; i < num_stretches; ++i) {
    new (stretches + i) Stretch({count * i / num_stretches, count * (i + 1) / num_stretches});
  }
  ParallelFor(num_stretches, [&](int64_t own) {
    int64_t victim = own;
    do {
      if (victim != own) stretches[own].Put(stretches[victim].TakeBackHalf());
      for (;;) {
        const Piece piece = stretches[own].TakeFront(grain);
        if (piece.empty()) break;
        body(context, piece.begin, piece.end);
        victim = own;
      }
      victim = (victim + 1) % num_stretches;
    } while (victim != own);
  });
}

}  // namespace fdsd
