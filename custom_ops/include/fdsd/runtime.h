#pragma once
// Process-wide settings of the kernel library: instruction-set level and number of threads.
#include "fdsd/status.h"

namespace fdsd {

// Highest level this processor supports.
Isa BestIsa();

// Level in use; starts as BestIsa(). SetIsa fails when the processor lacks the level.
Isa CurrentIsa();
Error SetIsa(Isa isa);

// Threads used by ParallelFor, the calling thread included. Starts as the number of processors the process may use.
// SetNumThreads must not run at the same time as an op.
int32_t NumThreads();
Error SetNumThreads(int32_t num_threads);

}  // namespace fdsd
