// C functions of programs on a device, and of their graphs. Nothing is thrown across them.
#include <memory>

#include "../../bindings/c_api.h"
#include "runtime/device_program.h"
#include "runtime/status.h"

using fdsd::cuda::DeviceProgram;

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the program, got none";

}  // namespace

// As fdsd_program_create; *program is one of these functions' own.
FDSD_EXPORT fdsd::Error fdsd_cuda_program_create(const fdsd::ProgramCreateParams* p, void** program) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    auto made = std::make_unique<DeviceProgram>();
    if (fdsd::Error error = made->Build(*p)) return error;
    *program = made.release();
    return nullptr;
  });
}
FDSD_EXPORT void fdsd_cuda_program_destroy(void* program) { delete static_cast<DeviceProgram*>(program); }

// Symbols hold until they are set again.
FDSD_EXPORT fdsd::Error fdsd_cuda_program_set(void* program, const int64_t* symbols, int32_t num_symbols) {
  return static_cast<DeviceProgram*>(program)->SetSymbols(symbols, num_symbols);
}
FDSD_EXPORT int64_t fdsd_cuda_program_workspace_bytes(void* program) {
  return static_cast<DeviceProgram*>(program)->WorkspaceBytes();
}
FDSD_EXPORT fdsd::Error fdsd_cuda_program_launch(void* program, void* workspace, void* stream) {
  return static_cast<DeviceProgram*>(program)->Launch(workspace, stream);
}
FDSD_EXPORT fdsd::Error fdsd_cuda_program_timed_launch(void* program, void* workspace, void* stream,
                                                       int64_t* nanoseconds) {
  return fdsd::WithinMemory(
      kOutOfMemory, [&] { return static_cast<DeviceProgram*>(program)->TimedLaunch(workspace, stream, nanoseconds); });
}
FDSD_EXPORT fdsd::Error fdsd_cuda_program_capture(void* program, void* workspace, void* stream, void** graph) {
  cudaGraphExec_t made = nullptr;
  const fdsd::Error error = static_cast<DeviceProgram*>(program)->Capture(workspace, stream, &made);
  *graph = made;
  return error;
}
FDSD_EXPORT fdsd::Error fdsd_cuda_graph_launch(void* graph, void* stream) {
  return fdsd::cuda::TextOf(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)));
}
FDSD_EXPORT void fdsd_cuda_graph_destroy(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }
