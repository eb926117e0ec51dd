#pragma once
// The peak rate of this machine's arithmetic, measured with the threads that the kernels use. It is one bound of a
// matrix product; memory is the other.
#include <cstdint>

#include "fdsd/linear.h"

namespace fdsd {

// Operations per second of the dot-product instruction that `linear` uses for a format on the level in use. A
// multiplication and an addition count as one each. All threads feed it from registers; the best of num_passes passes
// counts. 0 on the scalar level, which has no such instruction, on tiles emulated in C++, and when num_passes is < 1.
double DotPeak(LinearFormat format, int32_t num_passes);

}  // namespace fdsd
