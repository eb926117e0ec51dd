#include "emulation/bulk_copies.h"

#include <cinttypes>
#include <cstring>
#include <map>
#include <vector>

#include "emulation/architecture.h"
#include "emulation/engine.h"

namespace fdsd::emulation {
namespace {

constexpr int64_t kPieceBytes = 16;
// That others get while a thread waits: no kernel computes so long between two places where threads wait.
constexpr int kMaxTurns = 100'000;

struct Copy {
  const Allocation* allocation;
  char* to;
  std::vector<char> bytes;
};

struct Barrier {
  uint32_t thread = 0;  // that made it
  bool is_fenced = false;
  uint32_t phase = 0;
  bool has_arrived = false;
  int64_t num_expected = 0;
  int64_t num_started = 0;
  std::vector<Copy> copies;
};

// Of the block that runs.
std::map<const void*, Barrier> barriers;
uint32_t block = 0;

std::map<const void*, Barrier>& OfBlock() {
  if (block != Here().block_begin) barriers.clear();
  block = Here().block_begin;
  return barriers;
}

Barrier& Find(const Allocation* allocation, void* barrier) {
  Check(allocation, barrier, sizeof(uint64_t), Access::kAtomic);
  const auto found = OfBlock().find(barrier);
  if (found == OfBlock().end()) Fail("uses a barrier that was not initialized");
  return found->second;
}

void CheckPieces(const Allocation* allocation, const void* address, int64_t num_bytes, Access access) {
  for (int64_t i = 0; i < num_bytes; i += kPieceBytes)
    Check(allocation, static_cast<const char*>(address) + i, kPieceBytes, access);
}

// More bytes than were expected would count for the next phase, and no wait would see them.
void CheckStarted(const Barrier& barrier) {
  if (barrier.has_arrived && barrier.num_started > barrier.num_expected) {
    Fail("%" PRId64 " bytes are on their way where %" PRId64 " are expected", barrier.num_started,
         barrier.num_expected);
  }
}

void Arrive(Barrier* barrier) {
  for (const Copy& copy : barrier->copies) {
    SetArrived(copy.allocation, copy.to, copy.bytes.size());
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
  barrier->copies.clear();
  barrier->has_arrived = false;
  barrier->num_expected = barrier->num_started = 0;
  ++barrier->phase;
}

}  // namespace

void InitBarrier(const Allocation* allocation, void* barrier) {
  if (!HasBulkUnits()) Fail("a barrier of bulk copies on sm_%d, which has none", Architecture());
  if (!IsShared(allocation)) Fail("a barrier in what is no shared memory");
  Check(allocation, barrier, sizeof(uint64_t), Access::kWrite);
  if (OfBlock().count(barrier) != 0) Fail("initializes a barrier that is one");
  OfBlock()[barrier].thread = Here().linear;
}

void FenceBarriers() {
  for (auto& [address, barrier] : OfBlock()) barrier.is_fenced |= barrier.thread == Here().linear;
}

void ExpectBytes(const Allocation* allocation, void* barrier, int64_t num_bytes) {
  Barrier& own = Find(allocation, barrier);
  if (own.has_arrived) Fail("arrives at a barrier whose phase has not ended");
  own.has_arrived = true;
  own.num_expected = num_bytes;
  CheckStarted(own);
}

void StartBulkCopy(const Allocation* to_allocation, void* to, const Allocation* from_allocation, const void* from,
                   int64_t num_bytes, const Allocation* allocation, void* barrier) {
  Barrier& own = Find(allocation, barrier);
  if (!own.is_fenced) Fail("copies with a barrier that was not fenced");
  if (!IsShared(to_allocation)) Fail("copies asynchronously to what is no shared memory");
  if (num_bytes <= 0 || num_bytes % kPieceBytes != 0)
    Fail("misaligned: copies %" PRId64 " bytes, no multiple of 16", num_bytes);
  CheckPieces(from_allocation, from, num_bytes, Access::kRead);
  CheckPieces(to_allocation, to, num_bytes, Access::kBulkWrite);
  const char* const bytes = static_cast<const char*>(from);
  own.copies.push_back(Copy{to_allocation, static_cast<char*>(to), std::vector<char>(bytes, bytes + num_bytes)});
  own.num_started += num_bytes;
  SetInFlight(to_allocation, to, static_cast<size_t>(num_bytes), true);
  CheckStarted(own);
}

void WaitForBytes(const Allocation* allocation, void* barrier, uint32_t phase_bit) {
  Barrier& own = Find(allocation, barrier);
  for (int i = 0; own.phase % 2 == phase_bit; ++i) {
    if (own.has_arrived && own.num_started == own.num_expected) return Arrive(&own);
    if (i == kMaxTurns) {
      Fail("waits for bytes that never come: %" PRId64 " are on their way, %" PRId64 " are expected", own.num_started,
           own.num_expected);
    }
    LeaveThread();
  }
}

}  // namespace fdsd::emulation
