#pragma once
// Process-wide settings of the kernel library: instruction-set level and number of threads.
#include "fdsd/status.h"

namespace fdsd {

// Highest level this processor supports.
Isa BestIsa();

// Level in use; starts as BestIsa(). SetIsa fails when the processor lacks the level.
Isa CurrentIsa();
Error SetIsa(Isa isa);

// Why the level kAmx cannot be used here, nullptr if it can. The system's permission to use tiles, which is for the
// whole process, is asked for by the first call.
Error AmxRefusal();

// What level kAmx multiplies tiles with: the chip or, for tests on processors without AMX, a twin in plain C++ that is
// far slower and gives the same bits. kNone below that level.
enum class Tiles : int32_t { kNone = 0, kChip = 1, kTwin = 2 };
Tiles TilesInUse();
// From now on kAmx means the twin (which needs AVX-512), or the chip again. Not while an op runs, and not while kAmx is
// in use.
Error UseTileTwin(bool is_used);

// Threads used by ParallelFor, the calling thread included. Starts as the number of processors the process may use.
// SetNumThreads must not run at the same time as an op.
int32_t NumThreads();
Error SetNumThreads(int32_t num_threads);

}  // namespace fdsd
