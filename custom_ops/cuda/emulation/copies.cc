#include "emulation/copies.h"

#include <cstring>
#include <deque>
#include <vector>

#include "emulation/engine.h"
#include "emulation/per_thread.h"

namespace fdsd::emulation {
namespace {

constexpr size_t kMaxBytes = 16;

struct Copy {
  const Allocation* allocation;
  void* to;
  size_t num_bytes;
  char bytes[kMaxBytes];
};

// A thread's copies, and where its groups end among all it ever made.
struct Queue {
  std::deque<Copy> copies;
  std::deque<size_t> group_ends;
  size_t num_arrived = 0;
  std::vector<Copy> unfenced;
};

PerThread<Queue> queues;

}  // namespace

void StartCopy(const Allocation* allocation, void* to, const void* from, size_t num_bytes) {
  if (!IsShared(allocation)) Fail("copies asynchronously to what is no shared memory");
  // Whoever read what lies there has done so before.
  Check(allocation, to, num_bytes, Access::kWrite);
  Copy copy{allocation, to, num_bytes, {}};
  if (from != nullptr) std::memcpy(copy.bytes, from, num_bytes);
  queues.Own().copies.push_back(copy);
  SetInFlight(allocation, to, num_bytes, true);
}

void CommitCopies() {
  Queue& own = queues.Own();
  own.group_ends.push_back(own.num_arrived + own.copies.size());
}

void WaitForCopies(size_t num_pending) {
  Queue& own = queues.Own();
  while (own.group_ends.size() > num_pending) {
    for (; own.num_arrived < own.group_ends.front(); ++own.num_arrived) {
      const Copy& copy = own.copies.front();
      SetInFlight(copy.allocation, copy.to, copy.num_bytes, false);
      // Now, and by this thread, it is written: others see it behind a barrier.
      Check(copy.allocation, copy.to, copy.num_bytes, Access::kWrite);
      std::memcpy(copy.to, copy.bytes, copy.num_bytes);
      SetUnfenced(copy.allocation, copy.to, copy.num_bytes, true);
      own.unfenced.push_back(copy);
      own.copies.pop_front();
    }
    own.group_ends.pop_front();
  }
}

void FenceCopies() {
  Queue& own = queues.Own();
  for (const Copy& copy : own.unfenced) SetUnfenced(copy.allocation, copy.to, copy.num_bytes, false);
  own.unfenced.clear();
}

}  // namespace fdsd::emulation
