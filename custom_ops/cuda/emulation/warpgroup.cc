#include "emulation/warpgroup.h"

#include <cstring>
#include <vector>

#include "emulation/architecture.h"
#include "emulation/engine.h"
#include "emulation/per_thread.h"

namespace fdsd::emulation {
namespace {

constexpr int kNoElement = 0x80;  // in every byte: a large negative number as an integer, a tiny one as a float

struct Started {
  void* c;
  std::vector<uint32_t> elements;

  size_t num_bytes() const { return elements.size() * sizeof(uint32_t); }
};

struct Bytes {
  const Allocation* allocation;
  const void* address;
  size_t num_bytes;
};

struct Products {
  bool has_begun = false;
  size_t num_started = 0;
  std::vector<Started> started;  // the first num_started, then those kept for reuse
  std::vector<Bytes> read;

  void Clear() {
    has_begun = false;
    num_started = 0;
    read.clear();
  }
};
PerThread<Products> products;

}  // namespace

void BeginProducts() {
  if (!HasWarpgroups()) Fail("a product of a warpgroup on sm_%d, which has none", Architecture());
  products.Own().has_begun = true;
}

void ReadForProducts(const Allocation* allocation, const void* address, size_t num_bytes) {
  if (!IsShared(allocation)) Fail("multiplies what is no shared memory");
  Check(allocation, address, num_bytes, Access::kRead);
  if (!IsFenced(allocation, address, num_bytes)) Fail("multiplies what threads wrote, with no fence between");
  products.Own().read.push_back({allocation, address, num_bytes});
}

void* StartedElements(void* c, size_t count) {
  Products& own = products.Own();
  if (!own.has_begun) Fail("a product of a warpgroup before its registers are ready");
  for (size_t i = 0; i < own.num_started; ++i) {
    if (own.started[i].c == c) return own.started[i].elements.data();
  }
  if (own.num_started == own.started.size()) own.started.emplace_back();
  Started& started = own.started[own.num_started++];
  started.c = c;
  started.elements.resize(count);
  std::memcpy(started.elements.data(), c, started.num_bytes());
  std::memset(c, kNoElement, started.num_bytes());
  return started.elements.data();
}

void WaitForProducts() {
  Products& own = products.Own();
  for (const Bytes& bytes : own.read) Check(bytes.allocation, bytes.address, bytes.num_bytes, Access::kRead);
  for (size_t i = 0; i < own.num_started; ++i) {
    const Started& started = own.started[i];
    std::memcpy(started.c, started.elements.data(), started.num_bytes());
  }
  own.Clear();
}

}  // namespace fdsd::emulation
