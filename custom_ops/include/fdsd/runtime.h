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

// What level kAmx multiplies tiles with: the chip, or an emulation in plain C++ for tests on processors without AMX.
// The emulation (kTwin) is far slower and gives the same bits. kNone below that level.
enum class Tiles : int32_t { kNone = 0, kChip = 1, kTwin = 2 };
Tiles TilesInUse();
// For tests: from now on kAmx means these tiles, whatever processor and system allow; kNone: what they allow again.
// Needs AVX-512. kChip on a processor without tiles is for a caller that executes their instructions itself. Not
// allowed while an op runs or kAmx is in use.
Error AssumeTiles(Tiles tiles);
// Why the chip's tiles cannot be used: AmxRefusal(), or nullptr where they are assumed.
Error ChipRefusal();

// Threads that share the loops of ops, the calling thread included. Starts as the number of processors the process may
// use. New ones start with the first loop after SetNumThreads, which must not run at the same time as an op.
//   num_processors    how many of them the system runs at a time. More threads than that do not spin: it would take the
//                     time from those that have work.
int32_t NumThreads();
Error SetNumThreads(int32_t num_threads, int32_t num_processors);

// What the threads have done since they were started; not at the same time as SetNumThreads.
//   num_jobs      [1] loops that were shared: how often the threads met
//   of_threads    [NumThreads(), kThreadCounts], the calling thread first:
//                 pieces run; those of them taken from another thread's part; bytes read by pieces whose loop says how
//                 many; how often it was moved to the calling thread's processor, stopped in a piece; how often it went
//                 to sleep
constexpr int32_t kThreadCounts = 5;
void ThreadCounts(int64_t* num_jobs, int64_t* of_threads);

}  // namespace fdsd
