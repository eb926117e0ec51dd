// C functions over the ops: ctypes, tests and tools need no framework. runtime/ has those over memory and programs.
#include "../bindings/c_api.h"
#include "ops.h"

// Every op has the same two functions; workspace is nullptr where there are 0 bytes.
#define FDSD_CUDA_OP(Name, snake)                                                                         \
  FDSD_EXPORT fdsd::Error fdsd_cuda_##snake(const fdsd::Name##Params* p, void* workspace, void* stream) { \
    static_cast<void>(workspace);                                                                         \
    return fdsd::cuda::Name(*p, stream);                                                                  \
  }                                                                                                       \
  FDSD_EXPORT int64_t fdsd_cuda_##snake##_workspace_bytes(const fdsd::Name##Params* p) {                  \
    return static_cast<void>(p), 0;                                                                       \
  }
#define FDSD_CUDA_WORKSPACE_OP(Name, snake)                                                               \
  FDSD_EXPORT fdsd::Error fdsd_cuda_##snake(const fdsd::Name##Params* p, void* workspace, void* stream) { \
    return fdsd::cuda::Name(*p, workspace, stream);                                                       \
  }                                                                                                       \
  FDSD_EXPORT int64_t fdsd_cuda_##snake##_workspace_bytes(const fdsd::Name##Params* p) {                  \
    return fdsd::cuda::Name##WorkspaceBytes(*p);                                                          \
  }
#include "cuda_ops.inc"
#undef FDSD_CUDA_OP
#undef FDSD_CUDA_WORKSPACE_OP

#if defined(FDSD_EMULATED)
#include "emulation/launches.h"

// Launches since the library was loaded.
FDSD_EXPORT int64_t fdsd_cuda_num_launches() { return fdsd::emulation::NumLaunches(); }
// Launches are noted instead of run from now on, or run again; a line "threads dynamic_bytes kernel" for each.
FDSD_EXPORT void fdsd_cuda_note_launches(int32_t is_noted) { fdsd::emulation::NoteLaunches(is_noted != 0); }
FDSD_EXPORT const char* fdsd_cuda_noted_launches() { return fdsd::emulation::NotedLaunches(); }
// Bytes of memory that fdsd_cuda_allocate gave which kernels have read since then.
FDSD_EXPORT int64_t fdsd_cuda_bytes_read(const void* memory) { return fdsd::emulation::BytesRead(memory); }
// Streams and events that were created and not destroyed.
FDSD_EXPORT int64_t fdsd_cuda_num_streams() { return fdsd::emulation::NumStreams(); }
FDSD_EXPORT int64_t fdsd_cuda_num_events() { return fdsd::emulation::NumEvents(); }
// The chip that is emulated from now on: 80, 86, 89, 90, 100 or 120.
FDSD_EXPORT void fdsd_cuda_set_architecture(int32_t architecture) { fdsd::emulation::Architecture() = architecture; }
// What a kernel did wrong is forgotten.
FDSD_EXPORT void fdsd_cuda_reset() { fdsd::emulation::Reset(); }
#endif
