#include "emulation/copies.h"

#include <algorithm>
#include <cstring>
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

// A thread's copies on their way, and where their groups end among them.
struct Queue {
  std::vector<Copy> copies;
  std::vector<size_t> group_ends;

  void Clear() {
    copies.clear();
    group_ends.clear();
  }
};

PerThread<Queue> queues;

}  // namespace

void StartCopy(const Allocation* allocation, void* to, const void* from, size_t num_bytes) {
  if (!IsShared(allocation)) Fail("copies asynchronously to what is no shared memory");
  // All reads of what lies there must have been done before.
  Check(allocation, to, num_bytes, Access::kWrite);
  Copy copy{allocation, to, num_bytes, {}};
  if (from != nullptr) std::memcpy(copy.bytes, from, num_bytes);
  queues.Own().copies.push_back(copy);
  SetInFlight(allocation, to, num_bytes, true);
}

void CommitCopies() {
  Queue& own = queues.Own();
  own.group_ends.push_back(own.copies.size());
}

void WaitForCopies(size_t num_pending) {
  Queue& own = queues.Own();
  if (own.group_ends.size() <= num_pending) return;
  const auto last_group = own.group_ends.end() - static_cast<std::ptrdiff_t>(num_pending) - 1;
  const size_t num_arrived = *last_group;
  const auto end = own.copies.begin() + static_cast<std::ptrdiff_t>(num_arrived);
  for (auto copy = own.copies.begin(); copy != end; ++copy) {
    SetInFlight(copy->allocation, copy->to, copy->num_bytes, false);
    // Now, and by this thread, it is written: other threads see it after a barrier.
    Check(copy->allocation, copy->to, copy->num_bytes, Access::kWrite);
    std::memcpy(copy->to, copy->bytes, copy->num_bytes);
  }
  for (size_t& group_end : own.group_ends) group_end -= std::min(group_end, num_arrived);
  own.copies.erase(own.copies.begin(), end);
  own.group_ends.erase(own.group_ends.begin(), last_group + 1);
}

}  // namespace fdsd::emulation
