// Which emulated GPUs there are, and memory that processes share.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulation/architecture.h"
#include "emulation/cuda_api.h"
#include "emulation/memory.h"
#include "emulation/pages.h"

using namespace fdsd::emulation;

namespace {

int chosen = 0;

// What a handle holds.
struct SharedPages {
  int32_t process;
  int32_t file;
  uint64_t num_bytes;
};
static_assert(sizeof(SharedPages) <= sizeof(cudaIpcMemHandle_t));

std::string Setting() {
  const char* const text = std::getenv("FDSD_EMULATED_GPUS");
  return text == nullptr ? "1" : text;
}

int NumDevices() { return std::atoi(Setting().c_str()); }

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = NumDevices();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const int architecture = Architecture();
  *properties = cudaDeviceProp{"emulated GPU", architecture / 10, architecture % 10};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = ChipNow().sm_threads;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = Architecture() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = Architecture() % 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = ChipNow().sm_bytes;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = kRegistersOfSm;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = ChipNow().block_bytes;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = ChipNow().sm_blocks;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = kReservedBytes;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = chosen;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= NumDevices()) return Failed(cudaErrorInvalidDevice, "invalid device ordinal");
  chosen = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int other) {
  *can_access = device != other && !Setting().ends_with("-apart");
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned) {
  *on_device = memory;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  size_t num_bytes = 0;
  const int file = FileOf(memory, &num_bytes);
  if (file < 0) return Failed(cudaErrorInvalidValue, "memory: expected what cudaMalloc gave, got another address");
  const SharedPages shared{getpid(), file, num_bytes};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &shared, sizeof(shared));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags) {
  SharedPages shared;
  std::memcpy(&shared, &handle, sizeof(shared));
  if (flags != cudaIpcMemLazyEnablePeerAccess) return Failed(cudaErrorInvalidValue, "invalid argument");
  if (shared.process == getpid()) return Failed(cudaErrorInvalidValue, "handle: expected another process's, got own");
  *memory = AddPages(Pages::Open(shared.process, shared.file, shared.num_bytes), shared.num_bytes);
  if (*memory == nullptr) return Failed(cudaErrorInvalidValue, "handle: expected one of a process that runs");
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) { return cudaFree(memory); }
