#pragma once
// What this machine's arithmetic can do at best, measured with the threads the kernels use: the other bound beside
// memory of what a matrix product can reach.
#include <cstdint>

#include "fdsd/linear.h"

namespace fdsd {

// Operations per second, a multiplication and an addition each counting as one, of the dot-product instruction that
// `linear` uses for a format on the level in use, fed from registers by all threads: the best of num_passes passes. 0
// on the scalar level, which has none, on the twin of tiles, which nobody waits for, and when num_passes is < 1.
double DotPeak(LinearFormat format, int32_t num_passes);

}  // namespace fdsd
