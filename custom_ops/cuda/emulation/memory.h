#pragma once
// Memory of the emulated device, and the checks of every access to it. An access must be within its allocation, aligned
// and in no race. Where the memory is a block's own, it must not come before the first write.
//
// A race: two threads touch the same byte, one of them writes, not both with an atomic function, and nothing orders
// them. What orders: two launches; within a block __syncthreads; within a warp __syncwarp too. Nothing orders two
// blocks. Threads run one after the other here, so what is found does not depend on luck, only on the path they take.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fdsd/status.h"

namespace fdsd::emulation {

struct Allocation;
class Pages;

// The last: by a bulk copy, which needs a fence after what a thread wrote there.
enum class Access : int32_t { kRead, kWrite, kAtomic, kBulkWrite };

// Ends the kernel with an error unless the current thread may do this now.
void Check(const Allocation* allocation, const void* address, size_t num_bytes, Access access);

// Whether an asynchronous copy is on its way to these bytes of shared memory: until then no thread may touch them.
void SetInFlight(const Allocation* allocation, const void* address, size_t num_bytes, bool is_in_flight);
// What was on its way has come to these bytes: the running thread has written them, in order with the one that began
// it.
void SetArrived(const Allocation* allocation, const void* address, size_t num_bytes);
// The running thread's fence between its block's accesses to shared memory and those of units that read and write past
// threads, bulk copies and products of a warpgroup (fence.proxy.async).
void FenceProxies();
// Whether such a unit may touch these bytes of shared memory: some thread has fenced between what a thread wrote there
// and now, in the order that barriers make. What a bulk copy brought needs no fence.
bool IsFenced(const Allocation* allocation, const void* address, size_t num_bytes);
// Whether it is a block's shared memory.
bool IsShared(const Allocation* allocation);
// Bytes of the allocation that begins at an address which kernels have read so far, every thread's counted; -1 where
// none begins there.
int64_t BytesRead(const void* address);

// Says what is wrong with a range of an allocation that is copied as a whole; nullptr = nothing.
Error CheckRange(const Allocation* allocation, const void* address, size_t num_bytes);

// The allocation that holds an address; nullptr where none does. Its end belongs to an empty allocation only.
const Allocation* AllocationOf(const void* address);

// As cudaMalloc and cudaFree: memory that kernels may touch. Filled with 0xcb. nullptr where there is no memory.
void* Allocate(size_t num_bytes);
// The same of pages that hold something already.
void* AddPages(Pages pages, size_t num_bytes);
// Memory of the host that kernels may touch from now on, until Free; nullptr where there is no memory to watch it.
void* AddHostMemory(void* begin, size_t num_bytes);
// A file that holds the memory of the allocation which begins at an address from now on; -1 where there is none.
int FileOf(const void* address, size_t* num_bytes);
// False where no allocation begins at the address. Who touches it through an old pointer afterwards fails.
bool Free(void* address);

// An element of memory: what Checked<T>::operator[] gives where it may be written.
template <typename T>
class Element {
 public:
  Element(T* address, const Allocation* allocation) : address_(address), allocation_(allocation) {}
  operator T() const {
    Check(allocation_, address_, sizeof(T), Access::kRead);
    return *address_;
  }
  const Element& operator=(T value) const {
    Check(allocation_, address_, sizeof(T), Access::kWrite);
    *address_ = value;
    return *this;
  }
  const Element& operator=(const Element& other) const { return *this = static_cast<T>(other); }
  const Element& operator+=(T value) const { return *this = static_cast<T>(*this) + value; }

 private:
  T* address_;
  const Allocation* allocation_;
};

// A pointer that knows its allocation. Stands for T* in kernels.
template <typename T>
class Checked {
 public:
  Checked() = default;
  Checked(std::nullptr_t) {}
  Checked(T* address, const Allocation* allocation) : address_(address), allocation_(allocation) {}
  // What a launcher makes of a params struct's pointer.
  explicit Checked(std::conditional_t<std::is_const_v<T>, const void*, void*> address)
      : address_(static_cast<T*>(address)), allocation_(AllocationOf(address)) {}
  template <typename From, typename = std::enable_if_t<std::is_same_v<const From, T>>>
  Checked(const Checked<From>& other) : address_(other.address()), allocation_(other.allocation()) {}

  T* address() const { return address_; }
  const Allocation* allocation() const { return allocation_; }

  auto operator[](int64_t i) const {
    if constexpr (std::is_const_v<T>) {
      Check(allocation_, address_ + i, sizeof(T), Access::kRead);
      return address_[i];
    } else {
      return Element<T>(address_ + i, allocation_);
    }
  }
  auto operator*() const { return (*this)[0]; }
  Checked operator+(int64_t i) const { return Checked(address_ + i, allocation_); }
  bool operator==(std::nullptr_t) const { return address_ == nullptr; }

 private:
  T* address_ = nullptr;
  const Allocation* allocation_ = nullptr;
};

template <typename To, typename From>
Checked<To> View(const Checked<From>& p) {
  return Checked<To>(reinterpret_cast<To*>(p.address()), p.allocation());
}

// Shared memory of the block that runs: the array of a declaration, known by its address `site`; and what is dynamic.
const Allocation* SharedAllocation(const void* site, size_t num_bytes, void** address);
const Allocation* DynamicAllocation(void** address);

template <typename T>
Checked<T> SharedArray(const void* site, int64_t count) {
  void* address;
  const Allocation* allocation = SharedAllocation(site, static_cast<size_t>(count) * sizeof(T), &address);
  return Checked<T>(static_cast<T*>(address), allocation);
}

template <typename T>
Checked<T> DynamicShared() {
  void* address;
  const Allocation* allocation = DynamicAllocation(&address);
  return Checked<T>(static_cast<T*>(address), allocation);
}

// For the engine: a block begins, with this much dynamic shared memory; its shared memory is new.
void BeginSharedMemory(size_t dynamic_bytes);

}  // namespace fdsd::emulation
