#pragma once
// CUDA's statuses as our errors, and events that are destroyed.
#include <cstdint>
#include <vector>

#include "device.h"

namespace fdsd::cuda {

inline Error TextOf(cudaError_t status) { return status == cudaSuccess ? nullptr : cudaGetErrorString(status); }

class Events {
 public:
  Events() = default;
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Error Create(int64_t count) {
    while (static_cast<int64_t>(events_.size()) < count) {
      cudaEvent_t event;
      if (Error error = TextOf(cudaEventCreateWithFlags(&event, cudaEventDefault))) return error;
      events_.push_back(event);
    }
    return nullptr;
  }
  cudaEvent_t operator[](int64_t i) const { return events_[static_cast<size_t>(i)]; }

 private:
  std::vector<cudaEvent_t> events_;
};

}  // namespace fdsd::cuda
