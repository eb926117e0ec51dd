// C functions over the device that the calling thread uses, its memory, streams and events. To the caller, all
// addresses of the device are plain pointers.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../bindings/c_api.h"
#include "runtime/memory_ops.h"
#include "runtime/status.h"

using fdsd::cuda::TextOf;

FDSD_EXPORT const char* fdsd_cuda_architectures();

namespace {

// CUDA gives no address for no bytes.
size_t AtLeastOne(int64_t num_bytes) { return num_bytes > 0 ? static_cast<size_t>(num_bytes) : 1; }

// Whether there is code for a chip: that of the same first number and no larger second one, with an "a" of the same.
bool RunsOn(int major, int minor) {
  const char* text = fdsd_cuda_architectures();
  while (*(text += std::strcspn(text, "0123456789")) != '\0') {
    char* end = nullptr;
    const int64_t number = std::strtol(text, &end, 10);
    if (number / 10 == major && (*end == 'a' ? number % 10 == minor : number % 10 <= minor)) return true;
    text = end;
  }
  return false;
}

}  // namespace

// Why the kernels cannot run here; nullptr if they can.
FDSD_EXPORT fdsd::Error fdsd_cuda_refusal() {
  static thread_local char text[512];
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count)) return cudaGetErrorString(status);
  if (count == 0) return "the driver knows no GPU";
  int device = 0;
  cudaDeviceProp properties;
  if (const cudaError_t status = cudaGetDevice(&device)) return cudaGetErrorString(status);
  if (const cudaError_t status = cudaGetDeviceProperties(&properties, device)) return cudaGetErrorString(status);
  if (!RunsOn(properties.major, properties.minor)) {
    std::snprintf(text, sizeof(text), "the GPU is of sm_%d%d, the kernels are for %s", properties.major,
                  properties.minor, fdsd_cuda_architectures());
    return text;
  }
  return nullptr;
}

// The GPU's name; what it is called where there is none to use.
FDSD_EXPORT const char* fdsd_cuda_name() {
  static thread_local cudaDeviceProp properties;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return "no GPU";
  return cudaGetDeviceProperties(&properties, device) == cudaSuccess ? properties.name : "no GPU";
}

// The number of the calling thread's GPU.
FDSD_EXPORT fdsd::Error fdsd_cuda_current_device(int64_t* number) {
  int device = 0;
  const fdsd::Error error = TextOf(cudaGetDevice(&device));
  *number = device;
  return error;
}

// Of the GPU, whichever process has what is not free.
FDSD_EXPORT fdsd::Error fdsd_cuda_memory_bytes(int64_t* free_bytes, int64_t* total_bytes) {
  size_t free_size = 0;
  size_t total_size = 0;
  const fdsd::Error error = TextOf(cudaMemGetInfo(&free_size, &total_size));
  *free_bytes = static_cast<int64_t>(free_size);
  *total_bytes = static_cast<int64_t>(total_size);
  return error;
}

// Small allocations are cut out of pieces of this size. The emulation's are each their own, so that what is outside of
// one is seen.
FDSD_EXPORT int64_t fdsd_cuda_piece_bytes() {
#if defined(FDSD_EMULATED)
  return 0;
#else
  return 2 << 20;
#endif
}

FDSD_EXPORT fdsd::Error fdsd_cuda_allocate(int64_t num_bytes, void** memory) {
  return TextOf(cudaMalloc(memory, AtLeastOne(num_bytes)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_free(void* memory) { return TextOf(cudaFree(memory)); }
// Memory of the host that copies need not go around.
FDSD_EXPORT fdsd::Error fdsd_cuda_allocate_pinned(int64_t num_bytes, void** memory) {
  return TextOf(cudaMallocHost(memory, AtLeastOne(num_bytes)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_free_pinned(void* memory) { return TextOf(cudaFreeHost(memory)); }

// Either may be the host's; returns when it is done. In no order with what streams of ours have under way.
FDSD_EXPORT fdsd::Error fdsd_cuda_copy(void* to, const void* from, int64_t num_bytes) {
  if (fdsd::Error error = TextOf(cudaMemcpy(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault))) return error;
  // Of memory that is not pinned, cudaMemcpy may have copied no more than to memory of the driver, and our streams do
  // not wait for the default one.
  return TextOf(cudaStreamSynchronize(nullptr));
}
// Of the two, the host's must be pinned.
FDSD_EXPORT fdsd::Error fdsd_cuda_start_copy(void* to, const void* from, int64_t num_bytes, void* stream) {
  return TextOf(
      cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_zero(void* memory, int64_t num_bytes, void* stream) {
  return TextOf(cudaMemsetAsync(memory, 0, static_cast<size_t>(num_bytes), static_cast<cudaStream_t>(stream)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_scatter_pieces(const fdsd::ScatterPiecesParams* p, void* stream) {
  return fdsd::cuda::ScatterPieces(*p, stream);
}
FDSD_EXPORT fdsd::Error fdsd_cuda_copy_blocks(const fdsd::CopyBlocksParams* p, void* stream) {
  return fdsd::cuda::CopyBlocks(*p, stream);
}

FDSD_EXPORT fdsd::Error fdsd_cuda_stream_create(void** stream) {
  cudaStream_t made = nullptr;
  const cudaError_t status = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  *stream = made;
  return TextOf(status);
}
// What is on the stream is done first; this call does not wait for that.
FDSD_EXPORT fdsd::Error fdsd_cuda_stream_destroy(void* stream) {
  return TextOf(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_stream_synchronize(void* stream) {
  return TextOf(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_synchronize() { return TextOf(cudaDeviceSynchronize()); }

FDSD_EXPORT fdsd::Error fdsd_cuda_event_create(void** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t status = cudaEventCreateWithFlags(&made, cudaEventDefault);
  *event = made;
  return TextOf(status);
}
// One whose wait sleeps: for threads that have nothing else to do while steps run, and should take no processor's time.
FDSD_EXPORT fdsd::Error fdsd_cuda_sleeping_event_create(void** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t status = cudaEventCreateWithFlags(&made, cudaEventBlockingSync | cudaEventDisableTiming);
  *event = made;
  return TextOf(status);
}
FDSD_EXPORT fdsd::Error fdsd_cuda_event_destroy(void* event) {
  return TextOf(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_event_record(void* event, void* stream) {
  return TextOf(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}
// What is put on the stream from here on waits for the event; the host does not.
FDSD_EXPORT fdsd::Error fdsd_cuda_stream_wait(void* stream, void* event) {
  return TextOf(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}
// Between two events that have happened.
FDSD_EXPORT fdsd::Error fdsd_cuda_event_elapsed(void* begin, void* end, float* milliseconds) {
  return TextOf(cudaEventElapsedTime(milliseconds, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_event_synchronize(void* event) {
  return TextOf(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}
