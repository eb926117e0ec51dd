#pragma once
// What this machine's memory can do at best, measured with the threads the kernels use. Decoding streams every weight
// once per step, so read bandwidth bounds its speed; benchmarks report both.
#include <cstdint>

namespace fdsd {

// Bytes per second at which all threads together read a buffer of num_bytes from start to end: the best of num_passes
// passes. The buffer should be larger than the last-level cache. 0 when it cannot be allocated or an argument is < 1.
double ReadBandwidth(int64_t num_bytes, int32_t num_passes);

// Seconds a cache line written by one thread takes to be seen by another: the best of num_passes ping-pongs of 1000
// round trips. 0 with fewer than two threads, or when the threads do not run at the same time.
double CoreLatency(int32_t num_passes);

}  // namespace fdsd
