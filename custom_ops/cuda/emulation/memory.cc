#include "emulation/memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/architecture.h"
#include "emulation/engine.h"
#include "emulation/fences.h"
#include "emulation/pages.h"
#include "emulation/shadow.h"

namespace fdsd::emulation {

struct Allocation {
  char* begin;
  size_t num_bytes;
  bool is_shared;
  bool is_freed = false;
  mutable Shadows shadows;
  // Of a block's shared memory: words are marked with the period it began with, so a block finds no other's marks.
  mutable Marks in_flight{};
  // Likewise, of what threads wrote: 1 and how many fences there were before; 0 of what a bulk copy brought.
  mutable Marks fences_before{};
  mutable int64_t bytes_read = 0;
  std::vector<uint64_t> memory{};  // of a block's; aligned to 128 bytes within
  size_t capacity = 0;             // bytes that there is room for, here and in the shadows
  uint32_t block = 0;              // the period with which the block began whose it is
  Pages pages{};                   // of the device's
};

namespace {

constexpr size_t kAlignment = 128;
constexpr int kUnwritten = 0xcb;  // a large negative number as bfloat16, as float32 and as integers

std::unique_ptr<Allocation> NewAllocation(char* begin, size_t num_bytes, bool is_shared) {
  return std::unique_ptr<Allocation>(new Allocation{begin, num_bytes, is_shared, false, Shadows(num_bytes)});
}

std::unique_ptr<Allocation> NewSharedAllocation(size_t num_bytes) {
  auto made = NewAllocation(nullptr, num_bytes, true);
  made->capacity = num_bytes;
  made->memory.resize((num_bytes + 2 * kAlignment) / sizeof(uint64_t));
  const auto address = reinterpret_cast<uintptr_t>(made->memory.data());
  made->begin = reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
  return made;
}

size_t OffsetOf(const Allocation& allocation, const void* address) {
  return static_cast<size_t>(static_cast<const char*>(address) - allocation.begin);
}

Trace TraceNow(const ThreadPlace& here, Access access) {
  Trace now;
  now.period = here.period;
  now.warp_period = here.warp_period;
  now.thread = here.linear;
  now.is_atomic = access == Access::kAtomic;
  return now;
}

// Launches look allocations up in threads of their own.
std::mutex mutex;
// By their first byte. An empty one has an address of its own too.
std::map<const char*, std::unique_ptr<Allocation>> allocations;
// What was given back, without its memory: pointers to it may still be around, in graphs above all.
std::vector<std::unique_ptr<Allocation>> freed;
// Shared memory by the address of what declares it; nullptr is the dynamic one. Each block has the one before it had,
// but what was done to it then counts no more.
std::map<const void*, std::unique_ptr<Allocation>> shared;
size_t dynamic_bytes_of_block = 0;
size_t static_bytes_of_block = 0;

Fences fences;

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

inline void KeepRead(Shadow* shadow, const Trace& now, const ThreadPlace& here) {
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

// Of a block's shared arrays, the first time that it comes to one.
void AddStaticBytes(size_t num_bytes) {
  static_bytes_of_block += num_bytes;
  if (static_bytes_of_block > size_t{kStaticBytesOfBlock})
    Fail("has %zu bytes of shared arrays, %d are possible", static_bytes_of_block, kStaticBytesOfBlock);
  const size_t all_bytes = static_bytes_of_block + dynamic_bytes_of_block;
  if (all_bytes > static_cast<size_t>(ChipNow().block_bytes))
    Fail("expected at most %d KB of shared memory on sm_%d, got %zu bytes", ChipNow().block_bytes >> 10, Architecture(),
         all_bytes);
}

// Looks at an access to bytes whose shadow is in common, the first of them at `offset`.
[[gnu::always_inline]] inline void CheckBytes(const Allocation& allocation, size_t offset, Shadow* shadow,
                                              Access access, const Trace& now, const ThreadPlace& here) {
  const char* verb = access == Access::kRead ? "reads" : "writes";
  const uint32_t begin = allocation.is_shared ? here.block_begin : here.launch_begin;
  if (access == Access::kRead && allocation.is_shared && shadow->write.period < begin) {
    Fail("reads byte %zu of shared memory [%zu bytes] before anything was written there", offset, allocation.num_bytes);
  }
  const bool are_atomic = now.is_atomic && shadow->write.is_atomic;
  if (!are_atomic && !IsOrdered(shadow->write, now, here, begin)) {
    FailWithRace(allocation, offset, verb, "wrote", shadow->write, here);
  }
  if (access == Access::kRead) return KeepRead(shadow, now, here);
  for (const Trace& read : {shadow->read, shadow->other_read}) {
    if (!IsOrdered(read, now, here, begin)) FailWithRace(allocation, offset, verb, "read", read, here);
  }
  *shadow = Shadow{now, {}, {}};
}

char* Add(char* begin, size_t num_bytes, Pages pages) try {
  auto made = NewAllocation(begin, num_bytes, false);
  made->pages = std::move(pages);
  const std::lock_guard lock(mutex);
  return (allocations[begin] = std::move(made))->begin;
} catch (const std::bad_alloc&) {
  return nullptr;
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
  const bool writes = access == Access::kWrite || access == Access::kBulkWrite;
  if (!writes) allocation->bytes_read += static_cast<int64_t>(num_bytes);
  const size_t begin = static_cast<size_t>(offset);
  const bool meets_copy = allocation->is_shared && allocation->in_flight.Has(begin, num_bytes, here.block_begin);
  const Trace now = TraceNow(here, access);
  const bool is_fenced = access != Access::kBulkWrite || IsFenced(allocation, address, num_bytes);
  const auto visit = [&](size_t i, Shadow* shadow) __attribute__((always_inline)) {
    if (meets_copy && allocation->in_flight.Has(i, 1, here.block_begin)) {
      Fail("%s byte %zu of shared memory [%zu bytes], to which a copy is on its way", verb, i, allocation->num_bytes);
    }
    CheckBytes(*allocation, i, shadow, access, now, here);
  };
  allocation->shadows.ForEach(begin, begin + num_bytes, access != Access::kRead, visit);
  if (!is_fenced) {
    Fail("copies over bytes %zu..%zu of shared memory [%zu bytes], which threads wrote, with no fence between", begin,
         begin + num_bytes - 1, allocation->num_bytes);
  }
  if (allocation->is_shared && access != Access::kRead)
    allocation->fences_before.Set(begin, num_bytes, 1 + fences.count());
}

void SetInFlight(const Allocation* allocation, const void* address, size_t num_bytes, bool is_in_flight) {
  allocation->in_flight.Set(OffsetOf(*allocation, address), num_bytes, is_in_flight ? Here().block_begin : 0);
}

void SetArrived(const Allocation* allocation, const void* address, size_t num_bytes) {
  SetInFlight(allocation, address, num_bytes, false);
  const size_t begin = OffsetOf(*allocation, address);
  const Trace now = TraceNow(Here(), Access::kWrite);
  allocation->shadows.ForEach(begin, begin + num_bytes, true,
                              [&](size_t, Shadow* shadow) { *shadow = Shadow{now, {}, {}}; });
  allocation->fences_before.Set(begin, num_bytes, 0);
}

void FenceProxies() { fences.Add(TraceNow(Here(), Access::kRead)); }

bool IsFenced(const Allocation* allocation, const void* address, size_t num_bytes) {
  const ThreadPlace& here = Here();
  const Trace now = TraceNow(here, Access::kRead);
  const size_t begin = OffsetOf(*allocation, address);
  bool is_fenced = true;
  allocation->shadows.ForEach(begin, begin + num_bytes, false, [&](size_t i, const Shadow* shadow) {
    const uint32_t fences_before = allocation->fences_before.Of(i);
    if (fences_before == 0 || shadow->write.period < here.block_begin) return;
    is_fenced = is_fenced && fences.HasBetween(shadow->write, fences_before - 1, now);
  });
  return is_fenced;
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
  // Memory of the host may begin where it ends.
  return wanted == candidate->begin || wanted < candidate->begin + candidate->num_bytes ? candidate : nullptr;
}

void* Allocate(size_t num_bytes) {
  Pages pages = Pages::New(num_bytes);
  if (pages.begin() != nullptr) std::memset(pages.begin(), kUnwritten, num_bytes);
  return AddPages(std::move(pages), num_bytes);
}

void* AddPages(Pages pages, size_t num_bytes) {
  char* const begin = pages.begin();
  return begin == nullptr ? nullptr : Add(begin, num_bytes, std::move(pages));
}

void* AddHostMemory(void* begin, size_t num_bytes) { return Add(static_cast<char*>(begin), num_bytes, Pages()); }

int FileOf(const void* address, size_t* num_bytes) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(address));
  if (found == allocations.end()) return -1;
  *num_bytes = found->second->num_bytes;
  return found->second->pages.Share();
}

int64_t AllocationBytes(const void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(memory));
  return found == allocations.end() ? -1 : static_cast<int64_t>(found->second->num_bytes);
}

bool Free(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(static_cast<const char*>(address));
  if (found == allocations.end()) return false;
  Allocation& allocation = *found->second;
  allocation.is_freed = true;
  allocation.shadows = Shadows();
  allocation.pages = Pages();
  freed.push_back(std::move(found->second));
  allocations.erase(found);
  return true;
}

void BeginSharedMemory(size_t dynamic_bytes) {
  dynamic_bytes_of_block = dynamic_bytes;
  static_bytes_of_block = 0;
  fences.Clear();
}

const Allocation* SharedAllocation(const void* site, size_t num_bytes, void** address) {
  std::unique_ptr<Allocation>& found = shared[site];
  if (found == nullptr || found->capacity < num_bytes) {
    found = NewSharedAllocation(num_bytes);
  }
  if (found->block != Here().block_begin) {
    found->block = Here().block_begin;
    found->num_bytes = num_bytes;
    std::memset(found->begin, kUnwritten, num_bytes);
    if (site != nullptr) AddStaticBytes(num_bytes);
  }
  *address = found->begin;
  return found.get();
}

const Allocation* DynamicAllocation(void** address) {
  return SharedAllocation(nullptr, dynamic_bytes_of_block, address);
}

}  // namespace fdsd::emulation
