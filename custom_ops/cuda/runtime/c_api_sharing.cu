// C functions over several GPUs: which one a thread uses, and memory that processes share.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>

#include "../../bindings/c_api.h"
#include "runtime/status.h"

using fdsd::cuda::TextOf;

FDSD_EXPORT fdsd::Error fdsd_cuda_num_devices(int64_t* count) {
  int found = 0;
  const fdsd::Error error = TextOf(cudaGetDeviceCount(&found));
  *count = found;
  return error;
}
// What the calling thread does from now on is the device's of this number.
FDSD_EXPORT fdsd::Error fdsd_cuda_use_device(int32_t device) { return TextOf(cudaSetDevice(device)); }

// Whether a device can read and write another one's memory.
FDSD_EXPORT fdsd::Error fdsd_cuda_reaches(int32_t device, int32_t other, int64_t* can_access) {
  int found = 0;
  const fdsd::Error error = TextOf(cudaDeviceCanAccessPeer(&found, device, other));
  *can_access = found;
  return error;
}

// Bytes of a handle, and what sizes of shared memory are multiples of: CUDA shares the blocks that it has memory from
// whole, with whatever else is in them.
FDSD_EXPORT int64_t fdsd_cuda_share_handle_bytes() { return sizeof(cudaIpcMemHandle_t); }
FDSD_EXPORT int64_t fdsd_cuda_share_block_bytes() {
#if defined(FDSD_EMULATED)
  return 1;
#else
  return 2 << 20;
#endif
}

// Memory that fdsd_cuda_allocate gave, for other processes of this host. It must live for longer than they use it.
FDSD_EXPORT fdsd::Error fdsd_cuda_share(void* memory, char* handle) {
  cudaIpcMemHandle_t made;
  const fdsd::Error error = TextOf(cudaIpcGetMemHandle(&made, memory));
  std::memcpy(handle, &made, sizeof(made));
  return error;
}
// The memory of another process's handle, until it is closed.
FDSD_EXPORT fdsd::Error fdsd_cuda_open_shared(const char* handle, void** memory) {
  cudaIpcMemHandle_t theirs;
  std::memcpy(&theirs, handle, sizeof(theirs));
  return TextOf(cudaIpcOpenMemHandle(memory, theirs, cudaIpcMemLazyEnablePeerAccess));
}
// Bytes of the allocation that begins there, another process's too; CUDA's runtime does not say, its driver does.
FDSD_EXPORT fdsd::Error fdsd_cuda_allocation_bytes(void* memory, int64_t* num_bytes) {
#if defined(FDSD_EMULATED)
  *num_bytes = fdsd::emulation::AllocationBytes(memory);
  return *num_bytes < 0 ? "memory: expected the begin of an allocation" : nullptr;
#else
  using AddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
  static const auto range = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == nullptr ? nullptr : reinterpret_cast<AddressRange>(dlsym(driver, "cuMemGetAddressRange_v2"));
  }();
  unsigned long long begin = 0;
  size_t size = 0;
  const auto wanted = reinterpret_cast<unsigned long long>(memory);
  if (range == nullptr || range(&begin, &size, wanted) != 0 || begin != wanted) {
    return "memory: the driver does not say how long it is";
  }
  *num_bytes = static_cast<int64_t>(size);
  return nullptr;
#endif
}
FDSD_EXPORT fdsd::Error fdsd_cuda_close_shared(void* memory) { return TextOf(cudaIpcCloseMemHandle(memory)); }

// Let the GPU read and write pages of the host's; `on_device` receives its address for them.
FDSD_EXPORT fdsd::Error fdsd_cuda_register_host(void* memory, int64_t num_bytes, void** on_device) {
  if (fdsd::Error error = TextOf(cudaHostRegister(memory, static_cast<size_t>(num_bytes), cudaHostRegisterMapped)))
    return error;
  return TextOf(cudaHostGetDevicePointer(on_device, memory, 0));
}
FDSD_EXPORT fdsd::Error fdsd_cuda_unregister_host(void* memory) { return TextOf(cudaHostUnregister(memory)); }
