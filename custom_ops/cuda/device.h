#pragma once
// What every kernel file includes, for nvcc and for the emulation (docs/kernels/emulator.md): CUDA's names, pointers to
// device memory, shared arrays and launches. Kernels are written in CUDA C++, but for three things that the emulation
// checks:
//
//   DevicePtr<T>                     T* under nvcc. The emulation checks every access for bounds, alignment and races.
//                                    A kernel's pointer parameters have this type; a launcher makes them of the
//                                    params'.
//   FDSD_SHARED(T, name, count);     __shared__ T name[count], which is likewise checked, also for reads before writes.
//   Launch<kernel>(shape, stream, arguments...)
//
// What else kernels must keep: A block has whole warps, and warp functions name all lanes. Several blocks never meet in
// one launch: what needs another block's result is another launch. Nothing depends on the order of blocks.
#include <cstdint>

#include "fdsd/status.h"

#if defined(FDSD_EMULATED)
#include "emulation/cuda_names.h"
#else
#include <cuda_runtime.h>
#endif

namespace fdsd::cuda {

// A cudaStream_t. Launches on one stream run in order, and an op returns before they have run.
using Stream = void*;

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int32_t dynamic_bytes = 0;  // of shared memory that DynamicShared gives
};

#if defined(FDSD_EMULATED)

// While it lives, what is launched has the name of a program's call: a kernel's error may come only when it is waited
// for.
using CallName = emulation::CallName;

template <typename T>
using DevicePtr = emulation::Checked<T>;

// The same bytes as elements of another type; aligned for it.
template <typename To, typename From>
DevicePtr<To> ViewAs(DevicePtr<From> p) {
  return emulation::View<To>(p);
}

#define FDSD_SHARED(T, name, count) \
  static char name##_site;          \
  const ::fdsd::cuda::DevicePtr<T> name = ::fdsd::emulation::SharedArray<T>(&name##_site, count)

// The block's dynamic shared memory, aligned to 1024 bytes (128 in the emulation); the same for every call.
template <typename T>
DevicePtr<T> DynamicShared() {
  return emulation::DynamicShared<T>();
}

// Run a kernel: nothing is done where the grid is empty. Returns nullptr, or why it could not be launched; on stream
// nullptr the emulation also what the kernel did wrong.
template <auto kernel, typename... Arguments>
Error Launch(const LaunchShape& shape, Stream stream, const Arguments&... arguments) {
  const char* const name = __PRETTY_FUNCTION__;
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return nullptr;
  if (Error error = emulation::LaunchRefusal(name, shape.grid, shape.block, shape.dynamic_bytes)) return error;
  return emulation::Submit(stream, [=] {
    return emulation::RunKernel(name, shape.grid, shape.block, shape.dynamic_bytes, [&] { kernel(arguments...); });
  });
}

#else

struct CallName {
  CallName(int64_t, const char*) {}
};

template <typename T>
using DevicePtr = T*;

template <typename To, typename From>
__device__ __forceinline__ To* ViewAs(From* p) {
  return reinterpret_cast<To*>(p);
}

#define FDSD_SHARED(T, name, count) __shared__ T name[count]

template <typename T>
__device__ __forceinline__ T* DynamicShared() {
  extern __shared__ __align__(1024) unsigned char fdsd_dynamic_shared[];
  return reinterpret_cast<T*>(fdsd_dynamic_shared);
}

template <auto kernel, typename... Arguments>
Error Launch(const LaunchShape& shape, Stream stream, const Arguments&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return nullptr;
  // Needed where these and the kernel's shared arrays are more than 48 KB together.
  if (shape.dynamic_bytes > 0) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.dynamic_bytes);
    if (status != cudaSuccess) return cudaGetErrorString(status);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.dynamic_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

#endif

}  // namespace fdsd::cuda
