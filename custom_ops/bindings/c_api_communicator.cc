// C functions of communicators, for ctypes. Nothing is thrown across them.
#include "c_api.h"
#include "communicator.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for a communicator, got none";
constexpr fdsd::Error kNotOpen = "communicator: expected an open one, got another";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_communicator_open_shared(const fdsd::SharedCommunicatorParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return fdsd::OpenShared(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_communicator_open_callback(const fdsd::CallbackCommunicatorParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&] { return fdsd::OpenCallback(*p); });
}

FDSD_EXPORT fdsd::Error fdsd_communicator_begin(int32_t handle, int64_t attempt) {
  fdsd::Communicator* const communicator = fdsd::FindCommunicator(handle);
  return communicator == nullptr ? kNotOpen : communicator->Begin(attempt);
}

FDSD_EXPORT fdsd::Error fdsd_communicator_fail(int32_t handle) {
  fdsd::Communicator* const communicator = fdsd::FindCommunicator(handle);
  if (communicator == nullptr) return kNotOpen;
  communicator->Fail();
  return nullptr;
}

FDSD_EXPORT fdsd::Error fdsd_communicator_abort(int32_t handle) {
  fdsd::Communicator* const communicator = fdsd::FindCommunicator(handle);
  if (communicator == nullptr) return kNotOpen;
  communicator->Abort();
  return nullptr;
}

// See Communicator::flags; until the communicator is closed.
FDSD_EXPORT fdsd::Error fdsd_communicator_flags(int32_t handle, const void** flags) {
  fdsd::Communicator* const communicator = fdsd::FindCommunicator(handle);
  if (communicator == nullptr) return kNotOpen;
  *flags = communicator->flags();
  return *flags == nullptr ? "communicator: expected ranks that share memory, got others" : nullptr;
}

FDSD_EXPORT void fdsd_communicator_close(int32_t handle) { fdsd::CloseCommunicator(handle); }
