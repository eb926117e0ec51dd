#include <cmath>
#include <cstring>

#include "ops.h"
#include "runtime/device_program.h"
#include "runtime/memory_ops.h"
#include "runtime/status.h"

namespace fdsd::cuda {

struct DeviceProgram::Op : CallList::Op {
  int64_t (*workspace_bytes)(const void* params);
  Error (*launch)(const void* params, void* workspace, Stream stream);
};

#define FDSD_CUDA_OP(Name, snake)            \
  {{#snake, sizeof(Name##Params)},           \
   [](const void*) -> int64_t { return 0; }, \
   [](const void* params, void*, Stream stream) { return Name(*static_cast<const Name##Params*>(params), stream); }},
#define FDSD_CUDA_WORKSPACE_OP(Name, snake)                                                            \
  {{#snake, sizeof(Name##Params)},                                                                     \
   [](const void* params) { return Name##WorkspaceBytes(*static_cast<const Name##Params*>(params)); }, \
   [](const void* params, void* workspace, Stream stream) {                                            \
     return Name(*static_cast<const Name##Params*>(params), workspace, stream);                        \
   }},

const CallList::Op* DeviceProgram::FindOp(const char* name) {
  static constexpr Op kOps[] = {
#include "cuda_ops.inc"
      FDSD_CUDA_OP(PadColumns, pad_columns)};
  for (const Op& op : kOps) {
    if (std::strcmp(op.name, name) == 0) return &op;
  }
  return nullptr;
}
#undef FDSD_CUDA_OP
#undef FDSD_CUDA_WORKSPACE_OP

Error DeviceProgram::Build(const ProgramCreateParams& p) { return list_.Build(p, FindOp); }

int64_t DeviceProgram::WorkspaceBytes() const {
  int64_t most = 0;
  for (int64_t c = 0; c < list_.size(); ++c) {
    const int64_t num_bytes = static_cast<const Op&>(list_.op(c)).workspace_bytes(list_.params(c));
    if (num_bytes > most) most = num_bytes;
  }
  return most;
}

Error DeviceProgram::LaunchCall(int64_t call, void* workspace, Stream stream) const {
  const Op& op = static_cast<const Op&>(list_.op(call));
  const CallName name(call, op.name);
  if (Error error = op.launch(list_.params(call), workspace, stream)) return CallError(call, op.name, error);
  return nullptr;
}

Error DeviceProgram::Launch(void* workspace, Stream stream) const {
  for (int64_t c = 0; c < list_.size(); ++c) {
    if (Error error = LaunchCall(c, workspace, stream)) return error;
  }
  return nullptr;
}

Error DeviceProgram::TimedLaunch(void* workspace, Stream stream, int64_t* nanoseconds) const {
  Events events;
  const auto own = static_cast<cudaStream_t>(stream);
  if (Error error = events.Create(list_.size() + 1)) return error;
  if (Error error = TextOf(cudaEventRecord(events[0], own))) return error;
  for (int64_t c = 0; c < list_.size(); ++c) {
    if (Error error = LaunchCall(c, workspace, stream)) return error;
    if (Error error = TextOf(cudaEventRecord(events[c + 1], own))) return error;
  }
  if (Error error = TextOf(cudaStreamSynchronize(own))) return error;
  for (int64_t c = 0; c < list_.size(); ++c) {
    float milliseconds = 0;
    if (Error error = TextOf(cudaEventElapsedTime(&milliseconds, events[c], events[c + 1]))) return error;
    nanoseconds[c] = std::llround(static_cast<double>(milliseconds) * 1e6);
  }
  return nullptr;
}

Error DeviceProgram::Capture(void* workspace, Stream stream, cudaGraphExec_t* made) const {
  const auto own = static_cast<cudaStream_t>(stream);
  if (Error error = TextOf(cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal))) return error;
  const Error refusal = Launch(workspace, stream);
  // Ended also after a refusal, or the stream would go on capturing.
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(own, &graph);
  Error error = refusal != nullptr ? refusal : TextOf(status);
  if (error == nullptr) error = TextOf(cudaGraphInstantiate(made, graph, 0));
  if (graph != nullptr) cudaGraphDestroy(graph);
  return error;
}

}  // namespace fdsd::cuda
