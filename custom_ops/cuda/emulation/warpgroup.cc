#include "emulation/warpgroup.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "emulation/copies.h"
#include "emulation/engine.h"
#include "emulation/per_thread.h"

namespace fdsd::emulation {
namespace {

constexpr int32_t kNoElement = -2139062144;  // 0x80808080

struct Started {
  int32_t* c;
  int32_t elements[kProductElements];
};

struct Bytes {
  const Allocation* allocation;
  const void* address;
  size_t num_bytes;
};

struct Products {
  bool has_begun = false;
  std::deque<Started> started;
  std::vector<Bytes> read;
};
PerThread<Products> products;

}  // namespace

void BeginProducts() { products.Own().has_begun = true; }

void ReadForProducts(const Allocation* allocation, const void* address, size_t num_bytes) {
  if (!IsShared(allocation)) Fail("multiplies what is no shared memory");
  Check(allocation, address, num_bytes, Access::kRead);
  if (IsUnfenced(allocation, address, num_bytes)) Fail("multiplies what was copied, with no fence since");
  products.Own().read.push_back({allocation, address, num_bytes});
}

int32_t* StartedElements(int32_t* c) {
  Products& own = products.Own();
  if (!own.has_begun) Fail("a product of a warpgroup before its registers are ready");
  for (Started& started : own.started) {
    if (started.c == c) return started.elements;
  }
  Started& started = own.started.emplace_back(Started{c, {}});
  std::copy_n(c, kProductElements, started.elements);
  std::fill_n(c, kProductElements, kNoElement);
  return started.elements;
}

void WaitForProducts() {
  Products& own = products.Own();
  for (const Bytes& bytes : own.read) Check(bytes.allocation, bytes.address, bytes.num_bytes, Access::kRead);
  for (const Started& started : own.started) std::copy_n(started.elements, kProductElements, started.c);
  own = Products{};
}

}  // namespace fdsd::emulation
