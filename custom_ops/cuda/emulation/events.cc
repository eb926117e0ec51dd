#include <chrono>
#include <mutex>

#include "emulation/streams.h"

namespace {

int64_t num_events = 0;

}  // namespace

int64_t fdsd::emulation::NumEvents() {
  const std::lock_guard lock(StreamsMutex());
  return num_events;
}

using namespace fdsd::emulation;

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(StreamsMutex());
  return Waited(Submit(stream, [recorded = event->stream, end = event->end] { return RunTo(recorded.get(), end); }));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(StreamsMutex());
  *event = new Event;
  ++num_events;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(StreamsMutex());
  // What is under way may still write to it.
  const cudaError_t status = event->stream == nullptr ? cudaSuccess : Waited(RunTo(event->stream.get(), event->end));
  delete event;
  --num_events;
  return status;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(StreamsMutex());
  const cudaError_t status = Waited(Submit(stream, [event]() -> fdsd::Error {
    event->time = std::chrono::steady_clock::now();
    return nullptr;
  }));
  event->stream = stream == nullptr ? nullptr : stream->shared_from_this();
  event->end = stream == nullptr ? 0 : stream->end();
  return status;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(StreamsMutex());
  return Waited(RunTo(event->stream.get(), event->end));
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}
