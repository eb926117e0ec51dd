#include "emulation/streams.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "emulation/cuda_api.h"
#include "emulation/engine.h"
#include "emulation/memory.h"

namespace fdsd::emulation {

namespace {

std::recursive_mutex mutex;
std::vector<std::shared_ptr<Stream>> streams;
// What cudaMemcpy has on its way.
Stream default_stream;
// Begin of what cudaMallocHost gave -> its size.
std::map<const char*, size_t> pinned;
// What a kernel or a copy on a stream did wrong; nothing more is done then.
std::string fault;
thread_local std::string error_text;
thread_local std::string call_name;

void Drop(Stream* stream) {
  stream->num_done += stream->waiting.size();
  stream->waiting.clear();
}

Error Fault() { return fault.empty() ? nullptr : fault.c_str(); }

// Nothing that was under way is of use after an error.
Error Break(Error error) {
  if (fault.empty()) fault = error;
  for (auto& stream : streams) Drop(stream.get());
  Drop(&default_stream);
  return Fault();
}

cudaError_t WaitForAll() {
  if (Error error = RunTo(&default_stream, default_stream.end())) return Waited(error);
  // Copied: others may come while one rests.
  for (auto& stream : std::vector(streams)) {
    if (stream->captured != nullptr) {
      return Failed(cudaErrorStreamCaptureUnsupported, "expected no wait and no allocation while a graph is captured");
    }
    if (Error error = RunTo(stream.get(), stream->end())) return Waited(error);
  }
  return cudaSuccess;
}

bool IsPinned(const void* address, size_t num_bytes) {
  const char* wanted = static_cast<const char*>(address);
  auto found = pinned.upper_bound(wanted);
  if (found == pinned.begin()) return false;
  --found;
  return wanted + num_bytes <= found->first + found->second;
}

// nullptr, or what is wrong with a copy's one side.
Error CheckSide(const void* address, size_t num_bytes, bool may_be_pageable) {
  if (num_bytes == 0) return nullptr;
  if (const Allocation* allocation = AllocationOf(address)) return CheckRange(allocation, address, num_bytes);
  if (may_be_pageable || IsPinned(address, num_bytes)) return nullptr;
  return "copy: expected memory of the device or pinned memory of the host, got other";
}

Error Copy(void* to, const void* from, size_t num_bytes, bool may_be_pageable) {
  if (Error error = CheckSide(to, num_bytes, may_be_pageable)) return error;
  if (Error error = CheckSide(from, num_bytes, may_be_pageable)) return error;
  std::memcpy(to, from, num_bytes);
  return nullptr;
}

}  // namespace

std::recursive_mutex& StreamsMutex() { return mutex; }

Error RunTo(Stream* stream, uint64_t end) {
  if (Error error = Fault()) return error;
  while (stream != nullptr && stream->num_done < end) {
    if (stream->is_running) {
      Rest();
      if (Error error = Fault()) return error;
      continue;
    }
    const Operation operation = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    stream->is_running = true;
    const Error error = operation();
    stream->is_running = false;
    ++stream->num_done;
    if (error != nullptr) return Break(error);
  }
  return nullptr;
}

void Rest() {
  constexpr std::chrono::microseconds kNap(50);
  mutex.unlock();
  std::this_thread::sleep_for(kNap);
  mutex.lock();
}

cudaError_t Waited(Error error) { return error == nullptr ? cudaSuccess : Failed(cudaErrorLaunchFailure, error); }

cudaError_t Failed(cudaError_t status, const char* text) {
  error_text = text;
  return status;
}

CallName::CallName(int64_t call, const char* op) { call_name = "call " + std::to_string(call) + " (" + op + "): "; }
CallName::~CallName() { call_name.clear(); }

void Reset() {
  const std::lock_guard lock(mutex);
  fault.clear();
}

int64_t NumStreams() {
  const std::lock_guard lock(mutex);
  return static_cast<int64_t>(streams.size());
}

Error Submit(void* stream, Operation operation) {
  const std::lock_guard lock(mutex);
  auto* const own = static_cast<Stream*>(stream);
  if (own == nullptr) return operation();
  if (Error error = Fault()) return error;
  if (!call_name.empty()) {
    operation = [name = call_name, unnamed = std::move(operation)]() -> Error {
      static thread_local std::string text;
      const Error error = unnamed();
      if (error == nullptr) return nullptr;
      text = name + error;
      return text.c_str();
    };
  }
  if (own->captured != nullptr) {
    own->captured->operations->push_back(std::move(operation));
  } else {
    own->waiting.push_back(std::move(operation));
  }
  return nullptr;
}

}  // namespace fdsd::emulation

using namespace fdsd::emulation;

const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : error_text.c_str();
}

cudaError_t cudaMalloc(void** memory, size_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (const cudaError_t status = WaitForAll()) return status;
  *memory = Allocate(num_bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(mutex);
  if (const cudaError_t status = WaitForAll()) return status;
  if (memory == nullptr || Free(memory)) return cudaSuccess;
  return Failed(cudaErrorInvalidValue, "memory: expected what cudaMalloc gave, got another address");
}
cudaError_t cudaMallocHost(void** memory, size_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (fdsd::Error error = Fault()) return Waited(error);
  *memory = std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  pinned[static_cast<char*>(*memory)] = num_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t num_bytes, unsigned) {
  const std::lock_guard lock(mutex);
  return AddHostMemory(memory, num_bytes) != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaHostUnregister(void* memory) {
  const std::lock_guard lock(mutex);
  if (const cudaError_t status = WaitForAll()) return status;
  Free(memory);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  const std::lock_guard lock(mutex);
  if (const cudaError_t status = WaitForAll()) return status;
  pinned.erase(static_cast<char*>(memory));
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  // Of a small device; what is allocated is not counted.
  *free_bytes = *total_bytes = size_t{256} << 20;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
  const std::lock_guard lock(mutex);
  if (AllocationOf(to) == nullptr || AllocationOf(from) != nullptr || IsPinned(from, num_bytes)) {
    if (fdsd::Error error = RunTo(&default_stream, default_stream.end())) return Waited(error);
    return Waited(Copy(to, from, num_bytes, true));
  }
  const char* const begin = static_cast<const char*>(from);
  default_stream.waiting.push_back(
      [=, bytes = std::vector<char>(begin, begin + num_bytes)] { return Copy(to, bytes.data(), num_bytes, true); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  return Waited(Submit(stream, [=] { return Copy(to, from, num_bytes, false); }));
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t num_bytes, cudaStream_t stream) {
  return Waited(Submit(stream, [=]() -> fdsd::Error {
    if (fdsd::Error error = CheckSide(memory, num_bytes, false)) return error;
    std::memset(memory, value, num_bytes);
    return nullptr;
  }));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard lock(mutex);
  streams.push_back(std::make_shared<Stream>());
  *stream = streams.back().get();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  // Events may outlive it; they have happened.
  const std::shared_ptr<Stream> kept = stream->shared_from_this();
  const cudaError_t status = Waited(RunTo(stream, stream->end()));
  std::erase(streams, kept);
  return status;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  if (stream == nullptr) stream = &default_stream;
  if (stream->captured != nullptr) return WaitForAll();
  return Waited(RunTo(stream, stream->end()));
}
cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(mutex);
  return WaitForAll();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard lock(mutex);
  stream->captured = std::make_unique<Graph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex);
  *graph = stream->captured.release();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = new Graph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return Waited(Submit(stream, [operations = graph->operations]() -> fdsd::Error {
    for (const Operation& operation : *operations) {
      if (fdsd::Error error = operation()) return error;
    }
    return nullptr;
  }));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
