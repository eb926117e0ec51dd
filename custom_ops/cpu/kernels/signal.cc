#include "fdsd/signal.h"

#include <unistd.h>

namespace fdsd {
namespace FDSD_ISA {

Error Signal(const SignalParams& p) {
  if (p.num_tokens < 0) return "num_tokens: expected no negative number";
  __atomic_fetch_add(p.counter, int64_t{1}, __ATOMIC_RELEASE);
  const uint64_t one = 1;
  if (p.event_fd >= 0 && write(p.event_fd, &one, sizeof(one)) != sizeof(one)) {
    return "event_fd: expected an eventfd that can be written, got another";
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
