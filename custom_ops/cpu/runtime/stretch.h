#pragma once
// What is left of one thread's part of a job.
#include <atomic>
#include <cstdint>

namespace fdsd {

// Pieces [begin, end) of a job.
struct Pieces {
  uint32_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
};

// One thread's part of the jobs, one job after the other: its owner takes a piece from the front, others take half of
// what is left from the back. No thread prepares it for a job: a part that still names an older job is whole. That
// holds because a job ends when every piece has been taken. So a thread that comes late finds all parts of its job
// marked with it or a newer one, and takes nothing. The state never comes back within a job, as no piece that was taken
// returns. It also names the job, so a successful exchange saw the present state.
class alignas(64) Stretch {
 public:
  static constexpr uint32_t kMaxPieces = 0xffff;  // of a job

  // Take the first piece of what is left in `job`, of which `whole` is this part; empty = nothing is left.
  Pieces TakeFront(uint32_t job, Pieces whole) {
    return Take(job, whole, [](Pieces left) { return Pieces{left.begin, left.begin + 1}; });
  }

  // Take the back half, at least one piece.
  Pieces TakeBackHalf(uint32_t job, Pieces whole) {
    return Take(job, whole, [](Pieces left) { return Pieces{left.end - (left.end - left.begin + 1) / 2, left.end}; });
  }

  // By the owner, when nothing is left: what it took from another.
  void Put(uint32_t job, Pieces pieces) { state_.store(Pack(job, pieces), std::memory_order_relaxed); }

  // Between jobs, so that ages are told apart however many jobs ago the last one of this part was.
  void Mark(uint32_t job) { Put(job, {}); }

 private:
  static uint64_t Pack(uint32_t job, Pieces pieces) {
    return static_cast<uint64_t>(job) << 32 | static_cast<uint64_t>(pieces.begin) << 16 | pieces.end;
  }

  template <typename Choose>
  Pieces Take(uint32_t job, Pieces whole, Choose&& choose) {
    uint64_t seen = state_.load(std::memory_order_relaxed);
    for (;;) {
      // Numbers of jobs have 31 bits.
      const auto age = static_cast<int32_t>((job - static_cast<uint32_t>(seen >> 32)) << 1);
      if (age < 0) return {};  // this job is over
      const Pieces left =
          age > 0 ? whole
                  : Pieces{static_cast<uint32_t>(seen >> 16) & kMaxPieces, static_cast<uint32_t>(seen) & kMaxPieces};
      if (left.empty()) return {};
      const Pieces taken = choose(left);
      const Pieces rest = taken.end == left.end ? Pieces{left.begin, taken.begin} : Pieces{taken.end, left.end};
      if (state_.compare_exchange_weak(seen, Pack(job, rest), std::memory_order_relaxed)) return taken;
    }
  }

  std::atomic<uint64_t> state_{0};
};

}  // namespace fdsd
