#include "communicator.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace fdsd {
namespace {

std::atomic<Communicator*>& Slot(int32_t handle) {
  static std::atomic<Communicator*> slots[kMaxCommunicators];
  return slots[handle - 1];
}

bool IsHandle(int32_t handle) { return handle >= 1 && handle <= kMaxCommunicators; }

}  // namespace

Error RankError(int32_t rank, const char* what) {
  thread_local char text[160];
  std::snprintf(text, sizeof(text), "rank %d %s", static_cast<int>(rank), what);
  return text;
}

Error AddCommunicator(std::unique_ptr<Communicator> communicator, int32_t* handle) {
  for (*handle = 1; *handle <= kMaxCommunicators; ++*handle) {
    Communicator* empty = nullptr;
    if (!Slot(*handle).compare_exchange_strong(empty, communicator.get())) continue;
    communicator.release();
    return nullptr;
  }
  return "communicator: expected at most 256 open ones, got one more";
}

Communicator* FindCommunicator(int32_t handle) { return IsHandle(handle) ? Slot(handle).load() : nullptr; }

void CloseCommunicator(int32_t handle) {
  if (IsHandle(handle)) delete Slot(handle).exchange(nullptr);
}

}  // namespace fdsd
