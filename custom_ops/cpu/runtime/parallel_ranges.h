#pragma once
// Loops on all threads.
#include <cstdint>
#include <type_traits>

namespace fdsd {

using LoopBody = void (*)(void* context, int64_t begin, int64_t end);

// Call body(context, begin, end) for pieces of at most `grain` units that make up [0, count), each exactly once, on all
// threads; returns when all are done. Every thread goes through a part of its own in order, and through the same part
// in every loop of as many pieces. So what it touched first lies near it, and the processor's prefetcher runs ahead of
// it from piece to piece. A thread that is done takes half of what another has left. No result may depend on the pieces
// or on which thread runs one. A single piece stays on the calling thread, and so does a whole loop inside a piece of
// another.
//   unit_bytes    what a unit reads, for the counters; 0 = not known
void ParallelRangesRaw(int64_t count, int64_t grain, LoopBody body, void* context, int64_t unit_bytes);

template <typename Body>
void ParallelRanges(int64_t count, int64_t grain, Body&& body, int64_t unit_bytes = 0) {
  using Plain = std::remove_reference_t<Body>;
  ParallelRangesRaw(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)), unit_bytes);
}

}  // namespace fdsd
