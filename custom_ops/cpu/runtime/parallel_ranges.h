#pragma once
// Parallel loops whose threads each read one long stretch of memory.
#include <cstdint>
#include <type_traits>

namespace fdsd {

// Call body(context, begin, end) for pieces of at most `grain` that make up [0, count), each exactly once, on all
// threads; returns when all are done. Every thread goes through a stretch of its own in order, so that the processor's
// prefetcher runs ahead of it from piece to piece; a thread that is through takes half of what another has left.
// No result may depend on the pieces or on which thread runs one. From inside a task of ParallelFor all run on the
// calling thread; the body itself must not call ParallelRanges.
void ParallelRangesRaw(int64_t count, int64_t grain, void (*body)(void* context, int64_t begin, int64_t end),
                       void* context);

template <typename Body>
void ParallelRanges(int64_t count, int64_t grain, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  ParallelRangesRaw(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace fdsd
