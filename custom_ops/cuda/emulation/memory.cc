#include "emulation/memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/engine.h"
#include "emulation/pages.h"

namespace fdsd::emulation {

namespace {

// One access: its thread, the periods it was in, and whether it was atomic. All zero: there was none, as periods count
// from 1.
struct Trace {
  uint32_t period = 0;
  uint32_t warp_period : 20 = 0;
  uint32_t thread : 11 = 0;
  uint32_t is_atomic : 1 = 0;

  bool exists() const { return period != 0; }
  uint32_t warp() const { return thread / 32; }
};
static_assert(sizeof(Trace) == 8);

// What is remembered of a byte: the last write, and up to two reads since that a later write must not meet.
struct Shadow {
  Trace write;
  Trace read;
  Trace other_read;
};

}  // namespace

struct Allocation {
  char* begin;
  size_t num_bytes;
  bool is_shared;
  bool is_freed = false;
  mutable std::vector<Shadow> shadow;
  mutable std::vector<bool> in_flight;  // empty until a copy begins
  mutable std::vector<bool> unfenced;   // likewise
  mutable int64_t bytes_read = 0;
  std::vector<uint64_t> memory;  // of a block's; aligned to 128 bytes within
  Pages pages{};                 // of the device's
};

namespace {

constexpr size_t kAlignment = 128;
constexpr int kUnwritten = 0xcb;  // a NaN as bfloat16, a large negative number as float32 and as integers

std::unique_ptr<Allocation> NewAllocation(char* begin, size_t num_bytes, bool is_shared) {
  auto made = std::make_unique<Allocation>();
  made->begin = begin;
  made->num_bytes = num_bytes;
  made->is_shared = is_shared;
  made->shadow.resize(num_bytes);
  return made;
}

// Of the block that runs.
std::unique_ptr<Allocation> NewSharedAllocation(size_t num_bytes) {
  auto made = NewAllocation(nullptr, num_bytes, true);
  made->memory.resize((num_bytes + 2 * kAlignment) / sizeof(uint64_t));
  const auto address = reinterpret_cast<uintptr_t>(made->memory.data());
  made->begin = reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
  std::memset(made->begin, kUnwritten, num_bytes);
  return made;
}

// Marks bytes of an allocation.
void SetBytes(std::vector<bool>* marks, const Allocation& allocation, const void* address, size_t num_bytes,
              bool is_marked) {
  if (marks->empty()) marks->resize(allocation.num_bytes);
  const auto offset = static_cast<const char*>(address) - allocation.begin;
  std::fill_n(marks->begin() + offset, num_bytes, is_marked);
}

// Launches look allocations up in threads of their own.
std::mutex mutex;
// By their first byte. An empty one has an address of its own too.
std::map<const char*, std::unique_ptr<Allocation>> allocations;
// What was given back, without its memory: pointers to it may still be around, in graphs above all.
std::vector<std::unique_ptr<Allocation>> freed;
// Of the block that runs, by the address of what declares them; nullptr is the dynamic one.
std::map<const void*, std::unique_ptr<Allocation>> shared;
size_t dynamic_bytes_of_block = 0;

bool IsOrdered(const Trace& before, const Trace& now, const ThreadPlace& here) {
  if (!before.exists() || before.period < here.launch_begin) return true;
  if (before.period < here.block_begin) return false;
  if (before.thread == now.thread || before.period < now.period) return true;
  return before.warp() == now.warp() && before.warp_period < now.warp_period;
}

[[noreturn]] void FailWithRace(const Allocation& allocation, size_t offset, const char* verb, const char* verb_before,
                               const Trace& before, const ThreadPlace& here) {
  const char* memory = allocation.is_shared ? "shared" : "global";
  if (before.period < here.block_begin) {
    Fail("race: %s byte %zu of %s memory [%zu bytes], which another block %s", verb, offset, memory,
         allocation.num_bytes, verb_before);
  }
  Fail("race: %s byte %zu of %s memory [%zu bytes], which thread %u %s with no barrier between", verb, offset, memory,
       allocation.num_bytes, before.thread, verb_before);
}

void KeepRead(Shadow* shadow, const Trace& now, const ThreadPlace& here) {
  Trace& read = shadow->read;
  Trace& other = shadow->other_read;
  if (!read.exists() || read.period < here.block_begin || read.period < now.period || read.thread == now.thread) {
    if (read.thread != now.thread || read.period < here.block_begin || read.period < now.period) other = Trace{};
    read = now;
  } else if (!other.exists() || other.thread == now.thread || read.warp() != now.warp()) {
    other = now;
  } else if (other.warp() == now.warp()) {
    read = other;
    other = now;
  }
}

void CheckByte(const Allocation& allocation, size_t offset, Access access, const Trace& now, const ThreadPlace& here) {
  Shadow& shadow = allocation.shadow[offset];
  const char* verb = access == Access::kRead ? "reads" : "writes";
  if (access == Access::kRead && allocation.is_shared && !shadow.write.exists()) {
    Fail("reads byte %zu of shared memory [%zu bytes] before anything was written there", offset, allocation.num_bytes);
  }
  if (!allocation.in_flight.empty() && allocation.in_flight[offset]) {
    Fail("%s byte %zu of shared memory [%zu bytes], to which a copy is on its way", verb, offset, allocation.num_bytes);
  }
  const bool are_atomic = now.is_atomic && shadow.write.is_atomic;
  if (!are_atomic && !IsOrdered(shadow.write, now, here)) {
    FailWithRace(allocation, offset, verb, "wrote", shadow.write, here);
  }
  if (access == Access::kRead) return KeepRead(&shadow, now, here);
  for (const Trace& read : {shadow.read, shadow.other_read}) {
    if (!IsOrdered(read, now, here)) FailWithRace(allocation, offset, verb, "read", read, here);
  }
  shadow = Shadow{now, {}, {}};
}

}  // namespace

void Check(const Allocation* allocation, const void* address, size_t num_bytes, Access access) {
  const ThreadPlace& here = Here();
  const char* verb = access == Access::kRead ? "reads" : "writes";
  if (allocation == nullptr) Fail("%s %zu bytes through a pointer to no device memory", verb, num_bytes);
  if (allocation->is_freed) Fail("%s %zu bytes of memory that was given back", verb, num_bytes);
  const char* memory = allocation->is_shared ? "shared" : "global";
  const int64_t offset = static_cast<const char*>(address) - allocation->begin;
  if (offset < 0 || offset + static_cast<int64_t>(num_bytes) > static_cast<int64_t>(allocation->num_bytes)) {
    Fail("out of bounds: %s bytes %" PRId64 "..%" PRId64 " of %s memory [%zu bytes]", verb, offset,
         offset + static_cast<int64_t>(num_bytes) - 1, memory, allocation->num_bytes);
  }
  if (reinterpret_cast<uintptr_t>(address) % num_bytes != 0) {
    Fail("misaligned: %s %zu bytes at byte %" PRId64 " of %s memory", verb, num_bytes, offset, memory);
  }
  Trace now;
  now.period = here.period;
  now.warp_period = here.warp_period;
  now.thread = here.linear;
  now.is_atomic = access == Access::kAtomic;
  if (access != Access::kWrite) allocation->bytes_read += static_cast<int64_t>(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) CheckByte(*allocation, static_cast<size_t>(offset) + i, access, now, here);
}

void SetInFlight(const Allocation* allocation, const void* address, size_t num_bytes, bool is_in_flight) {
  SetBytes(&allocation->in_flight, *allocation, address, num_bytes, is_in_flight);
}

void SetArrived(const Allocation* allocation, const void* address, size_t num_bytes) {
  SetInFlight(allocation, address, num_bytes, false);
  const ThreadPlace& here = Here();
  Trace now;
  now.period = here.period;
  now.warp_period = here.warp_period;
  now.thread = here.linear;
  const auto first = allocation->shadow.begin() + (static_cast<const char*>(address) - allocation->begin);
  std::fill_n(first, num_bytes, Shadow{now, {}, {}});
}

void SetUnfenced(const Allocation* allocation, const void* address, size_t num_bytes, bool is_unfenced) {
  SetBytes(&allocation->unfenced, *allocation, address, num_bytes, is_unfenced);
}

bool IsUnfenced(const Allocation* allocation, const void* address, size_t num_bytes) {
  if (allocation->unfenced.empty()) return false;
  const auto first = allocation->unfenced.begin() + (static_cast<const char*>(address) - allocation->begin);
  return std::find(first, first + static_cast<std::ptrdiff_t>(num_bytes), true) !=
         first + static_cast<std::ptrdiff_t>(num_bytes);
}

bool IsShared(const Allocation* allocation) { return allocation != nullptr && allocation->is_shared; }

Error CheckRange(const Allocation* allocation, const void* address, size_t num_bytes) {
  const char* const begin = static_cast<const char*>(address);
  const bool is_inside = begin + num_bytes <= allocation->begin + allocation->num_bytes;
  return is_inside ? nullptr : "copy: expected bytes within one allocation, got more";
}

int64_t BytesRead(const void* address) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(address));
  return found == allocations.end() ? -1 : found->second->bytes_read;
}

const Allocation* AllocationOf(const void* address) {
  const std::lock_guard lock(mutex);
  const char* wanted = static_cast<const char*>(address);
  auto found = allocations.upper_bound(wanted);
  if (found == allocations.begin()) return nullptr;
  const Allocation* candidate = std::prev(found)->second.get();
  return wanted <= candidate->begin + candidate->num_bytes ? candidate : nullptr;
}

void* Allocate(size_t num_bytes) {
  Pages pages = Pages::New(num_bytes);
  if (pages.begin() != nullptr) std::memset(pages.begin(), kUnwritten, num_bytes);
  return AddPages(std::move(pages), num_bytes);
}

void* AddPages(Pages pages, size_t num_bytes) try {
  char* const begin = pages.begin();
  if (begin == nullptr) return nullptr;
  auto made = NewAllocation(begin, num_bytes, false);
  made->pages = std::move(pages);
  const std::lock_guard lock(mutex);
  allocations[begin] = std::move(made);
  return begin;
} catch (const std::bad_alloc&) {
  return nullptr;
}

int FileOf(const void* address, size_t* num_bytes) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(address));
  if (found == allocations.end()) return -1;
  *num_bytes = found->second->num_bytes;
  return found->second->pages.Share();
}

bool Free(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(address));
  if (found == allocations.end()) return false;
  Allocation& allocation = *found->second;
  allocation.is_freed = true;
  // An assignment of {} would keep the vectors' memory.
  std::vector<Shadow>().swap(allocation.shadow);
  allocation.pages = Pages();
  std::vector<bool>().swap(allocation.in_flight);
  std::vector<bool>().swap(allocation.unfenced);
  freed.push_back(std::move(found->second));
  allocations.erase(found);
  return true;
}

void BeginSharedMemory(size_t dynamic_bytes) {
  shared.clear();
  dynamic_bytes_of_block = dynamic_bytes;
}

const Allocation* SharedAllocation(const void* site, size_t num_bytes, void** address) {
  std::unique_ptr<Allocation>& found = shared[site];
  if (found == nullptr) found = NewSharedAllocation(num_bytes);
  *address = found->begin;
  return found.get();
}

const Allocation* DynamicAllocation(void** address) {
  return SharedAllocation(nullptr, dynamic_bytes_of_block, address);
}

}  // namespace fdsd::emulation
