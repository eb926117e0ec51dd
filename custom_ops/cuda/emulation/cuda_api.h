#pragma once
// The functions of CUDA's runtime that our host code calls, over the emulated device, with CUDA's names and meanings.
//
// What is put on a stream is done as late as CUDA allows: when the host waits for it, or something else that it waits
// for does. So a wait that is missing shows every time: the host reads what was there before, or a copy takes what
// the host has written since. Stream nullptr is the exception: what is put there is done at once, so that a test of one
// kernel gets its error from the launch. An error ends all that is under way; the wait that meets it returns it, and so
// does everything from then on, until Reset.
#include <cstddef>
#include <cstdint>
#include <functional>

#include "fdsd/status.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
};
// What the last error of this thread said.
const char* cudaGetErrorString(cudaError_t status);

namespace fdsd::emulation {
struct Stream;
struct Event;
struct Graph;
}  // namespace fdsd::emulation
using cudaStream_t = fdsd::emulation::Stream*;
using cudaEvent_t = fdsd::emulation::Event*;
using cudaGraph_t = fdsd::emulation::Graph*;
using cudaGraphExec_t = fdsd::emulation::Graph*;

enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0;
constexpr unsigned cudaEventBlockingSync = 1;
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaHostRegisterMapped = 2;

struct cudaDeviceProp {
  char name[256];
  int major;
  int minor;
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};
// As many as $FDSD_EMULATED_GPUS says, one by default; where it ends in "-apart", none reaches another's memory. All
// have the process's memory: which one is chosen shows nowhere.
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int other);

// Memory of another process of this host. As with CUDA, a process cannot open what is its own.
struct cudaIpcMemHandle_t {
  char reserved[64];
};
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);

cudaError_t cudaMalloc(void** memory, size_t num_bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocHost(void** memory, size_t num_bytes);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostRegister(void* memory, size_t num_bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned flags);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t num_bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
// All streams have one priority: in what order they get on is open anyway.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

// A graph keeps launches and copies with the arguments they had.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);

namespace fdsd::emulation {

// What a stream does, one after the other; returns an error that ends it.
using Operation = std::function<Error()>;

// While it lives, the errors of what is submitted begin with `call 3 (linear): `.
class CallName {
 public:
  CallName(int64_t call, const char* op);
  ~CallName();
  CallName(const CallName&) = delete;
  CallName& operator=(const CallName&) = delete;
};

// Go on after an error, which CUDA does not: for tests of such an error.
void Reset();
// Of the device's memory that begins there, -1 where none does.
int64_t AllocationBytes(const void* memory);
// Streams and events that were created and not destroyed.
int64_t NumStreams();
int64_t NumEvents();
// Returns the status, for which cudaGetErrorString then has the text.
cudaError_t Failed(cudaError_t status, const char* text);

// Put an operation on a stream, or into the graph that is captured from it.
Error Submit(void* stream, Operation operation);
// For an operation that waits for another process: what other threads of this one have put on other streams may run
// meanwhile, a little.
void Rest();

}  // namespace fdsd::emulation
