// Kernels that do what no kernel may, one each, and some that come close: what the emulation must find, and what not.
#include <cstring>

#include "../../custom_ops/bindings/c_api.h"
#include "bulk_copies.h"
#include "device.h"
#include "peer_words.h"
#include "warpgroup.h"

namespace {

using fdsd::cuda::DevicePtr;
using fdsd::cuda::kAllLanes;
using fdsd::cuda::Launch;
using fdsd::cuda::LaunchShape;
using fdsd::cuda::ViewAs;

constexpr int kThreads = 64;

using Ints = DevicePtr<int32_t>;

__global__ void SharedRace(Ints p, bool waits) {
  FDSD_SHARED(int32_t, s, kThreads);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = 1;
  if (waits) __syncthreads();
  p[threadIdx.x] = s[(threadIdx.x + 1) % kThreads];
}

// Reads before the neighbour writes, or after.
__global__ void WriteAfterRead(Ints p, bool waits) {
  const int32_t neighbour = p[(threadIdx.x + 1) % kThreads];
  if (waits) __syncthreads();
  p[threadIdx.x] = neighbour;
}

// Two blocks' threads write; one publishes what its block wrote or all, with a barrier before or without one.
__global__ void Publish(Ints p, bool waits, bool publishes_all) {
  constexpr int kHalf = kThreads / 2;
  if (threadIdx.x < kHalf) p[blockIdx.x * kHalf + threadIdx.x] = 1;
  if (waits) __syncthreads();
  if (blockIdx.x == 0 || threadIdx.x != 0) return;
  fdsd::cuda::AboutToPublish(publishes_all ? p : p + kHalf, publishes_all ? kThreads : kHalf);
}

__global__ void SameElement(Ints p) { p[0] = static_cast<int32_t>(threadIdx.x); }

// Two bytes of a word are not the same element.
__global__ void NeighbourBytes(Ints p) { ViewAs<uint8_t>(p)[threadIdx.x] = 1; }

// One thread writes a byte of a word and another the word; then the word and another of its bytes.
__global__ void BytesOfAWord(Ints p, bool waits_for_word, bool waits_for_byte) {
  if (threadIdx.x == 0) ViewAs<uint8_t>(p)[2] = 1;
  if (waits_for_word) __syncthreads();
  if (threadIdx.x == 33) p[0] = 2;
  __syncthreads();
  if (threadIdx.x == 0) p[0] = 3;
  if (waits_for_byte) __syncthreads();
  if (threadIdx.x == 33) ViewAs<uint8_t>(p)[3] = 4;
}

// A block has the shared memory that another had, but nothing that this wrote.
__global__ void OfBlockBefore(Ints p) {
  FDSD_SHARED(int32_t, s, kThreads);
  if (blockIdx.x == 0) s[threadIdx.x] = 1;
  const int32_t own = s[threadIdx.x];
  if (blockIdx.x == 0) p[threadIdx.x] = own;
}

__global__ void BlockRace(Ints p, bool is_apart) {
  if (threadIdx.x == 0) p[is_apart ? static_cast<int>(blockIdx.x) : 0] = 1;
}

__global__ void ReadOfOtherBlock(Ints p) {
  if (threadIdx.x == 0) p[blockIdx.x] = p[0] + 1;
}

// Neighbours in a warp, or across two.
__global__ void WarpExchange(Ints p, bool waits, int distance) {
  FDSD_SHARED(int32_t, s, kThreads);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = 1;
  if (waits) {
    __syncwarp();
  } else {
    __shfl_xor_sync(kAllLanes, 1, 1);
  }
  p[threadIdx.x] = s[threadIdx.x ^ static_cast<unsigned>(distance)];
}

__global__ void Counter(Ints p, bool is_plain_once) {
  if (is_plain_once && threadIdx.x == kThreads - 1) {
    p[0] += 1;
  } else {
    atomicAdd(p, 1);
  }
}

__global__ void Outside(Ints p, int64_t index, bool writes) {
  if (threadIdx.x != 3) return;
  if (writes) {
    p[index] = 1;
  } else {
    p[0] = p[index];
  }
}

__global__ void OutsideShared(Ints p, int index) {
  FDSD_SHARED(int32_t, s, kThreads);
  s[threadIdx.x] = 0;
  __syncthreads();
  p[threadIdx.x] = s[static_cast<int>(threadIdx.x) + index];
}

__global__ void OutsideDynamic(Ints p) { fdsd::cuda::DynamicShared<int32_t>()[threadIdx.x] = *p; }

__global__ void Misaligned(Ints p) {
  if (threadIdx.x == 0) ViewAs<uint4>(p + 1)[0] = uint4{0, 0, 0, 0};
}

__global__ void Unwritten(Ints p) {
  FDSD_SHARED(int32_t, s, kThreads);
  if (threadIdx.x < 32) s[threadIdx.x] = 0;
  __syncthreads();
  p[threadIdx.x] = s[threadIdx.x];
}

__global__ void HalfABarrier(Ints p) {
  if (threadIdx.x < 32) __syncthreads();
  p[threadIdx.x] = 0;
}

__global__ void TwoBarriers(Ints p) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  p[threadIdx.x] = 0;
}

__global__ void HalfAWarp(Ints p) {
  if (threadIdx.x % 32 < 16) __syncwarp();
  p[threadIdx.x] = 0;
}

__global__ void SomeLanes(Ints p) { p[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 1); }

// Copies an element to shared memory, which its thread or another reads; or one before all is read that was copied.
__global__ void CopyThenRead(Ints p, bool waits, bool meets, int distance) {
  using fdsd::cuda::CommitCopies;
  using fdsd::cuda::WaitForCopies;
  FDSD_SHARED(int32_t, s, kThreads);
  const DevicePtr<const uint8_t> from = ViewAs<const uint8_t>(p + threadIdx.x);
  fdsd::cuda::CopyAsync<4>(ViewAs<uint8_t>(s + threadIdx.x), from);
  CommitCopies();
  CommitCopies();
  if (waits) {
    WaitForCopies<1>();
  } else {
    WaitForCopies<2>();
  }
  if (meets) __syncthreads();
  p[threadIdx.x] = s[(static_cast<int>(threadIdx.x) + distance) % kThreads];
}

__global__ void CopyOverRead(Ints p, bool meets) {
  FDSD_SHARED(int32_t, s, kThreads);
  s[threadIdx.x] = 0;
  __syncthreads();
  const int32_t neighbour = s[(threadIdx.x + 1) % kThreads];
  if (meets) __syncthreads();
  fdsd::cuda::CopyAsync<4>(ViewAs<uint8_t>(s + threadIdx.x), ViewAs<const uint8_t>(p), false);
  fdsd::cuda::CommitCopies();
  fdsd::cuda::WaitForCopies<0>();
  p[threadIdx.x] = neighbour + s[threadIdx.x];
}

// How a bulk copy may go wrong.
struct BulkFault {
  int num_more_expected = 0;  // bytes
  int num_bytes = kThreads * 4;
  int to = 0;
  int from = 0;
  uint32_t phase_bit = 0;
  bool initializes = true;
  bool initializes_again = false;
  bool fences = true;
  bool meets = true;  // behind what makes the barrier
  bool waits = true;
  bool meets_readers = true;
  // Who fences what all threads wrote to where the copy goes: none, the thread that copies, each that wrote, before it
  // wrote, or behind it; or another than the one that copies, with no barrier behind.
  enum { kNone, kCopier, kEarly, kWriters, kOther } fenced_by = kCopier;
};

// One thread copies all elements to shared memory, which all threads have read, and then read.
__global__ void BulkCopy(Ints p, BulkFault fault) {
  using fdsd::cuda::BulkBarrier;
  FDSD_SHARED(int32_t, s, kThreads);
  FDSD_SHARED(BulkBarrier, barrier, 1);
  if (fault.fenced_by == BulkFault::kEarly) fdsd::cuda::FenceBulkWrites();
  s[threadIdx.x] = 0;
  if (fault.fenced_by == BulkFault::kWriters) fdsd::cuda::FenceBulkWrites();
  if (threadIdx.x == 0) {
    if (fault.initializes) fdsd::cuda::InitBulkBarrier(barrier);
    if (fault.initializes_again) fdsd::cuda::InitBulkBarrier(barrier);
    if (fault.fences) fdsd::cuda::FenceBulkBarriers();
  }
  if (fault.meets) __syncthreads();
  const int32_t neighbour = fault.meets ? static_cast<int32_t>(s[(threadIdx.x + 1) % kThreads]) : 0;
  if (fault.meets && fault.meets_readers) __syncthreads();
  if (threadIdx.x == 0 && fault.fenced_by == BulkFault::kOther) fdsd::cuda::FenceBulkWrites();
  if (threadIdx.x == kThreads - 1) {
    if (fault.fenced_by == BulkFault::kCopier) fdsd::cuda::FenceBulkWrites();
    fdsd::cuda::ExpectBytes(barrier, kThreads * 4 + fault.num_more_expected);
    fdsd::cuda::CopyBulk(ViewAs<uint8_t>(s + fault.to), ViewAs<const uint8_t>(p + fault.from), fault.num_bytes,
                         barrier);
  }
  if (fault.waits) fdsd::cuda::WaitForBytes(barrier, fault.phase_bit);
  __syncthreads();
  p[threadIdx.x] = s[threadIdx.x] + neighbour;
}

// A warpgroup multiplies rows that it has copied, or written, a line for each thread: with all that it must do, or
// less.
template <typename Kind>
__global__ void WarpgroupProduct(Ints p, bool fences, bool begins, bool writes_over, bool waits, bool copies) {
  constexpr int kLineBytes = 32;
  constexpr int kRows = 64;
  constexpr int kCount = kRows / 2;
  FDSD_SHARED(uint8_t, rows, kRows* fdsd::cuda::kWarpgroupRowBytes);
  for (int i = 0; i < kLineBytes; i += 16) {
    const DevicePtr<uint8_t> piece = rows + (static_cast<int>(threadIdx.x) * kLineBytes + i);
    if (copies) {
      fdsd::cuda::CopyAsync<16>(piece, ViewAs<const uint8_t>(p));
    } else {
      ViewAs<uint4>(piece)[0] = uint4{0, 0, 0, 0};
    }
  }
  fdsd::cuda::CommitCopies();
  fdsd::cuda::WaitForCopies<0>();
  if (fences) fdsd::cuda::FenceCopies();
  __syncthreads();
  typename Kind::Element c[kCount] = {};
  const uint32_t a[4] = {1, 1, 1, 1};
  if (begins) fdsd::cuda::BeginWarpgroupProducts<kCount>(c);
  fdsd::cuda::AddWarpgroupProduct<Kind, kRows>(c, a, rows, 0);
  if (writes_over) rows[threadIdx.x] = 0;
  if (waits) fdsd::cuda::WaitForWarpgroupProducts<kCount>(c);
  // The rows are zeros.
  if (c[0] != typename Kind::Element{}) Ints(nullptr)[0] = 0;
}

__global__ void CopyToGlobal(Ints p) {
  fdsd::cuda::CopyAsync<4>(ViewAs<uint8_t>(p + threadIdx.x), ViewAs<const uint8_t>(p + threadIdx.x));
}

__global__ void Fill(Ints p) { p[threadIdx.x] = static_cast<int32_t>(threadIdx.x); }

// Products of e4m3, which not all chips have.
__global__ void Fp8Product(Ints p) {
  float c[4] = {};
  const uint32_t zeros[4] = {};
  fdsd::cuda::AddNativeFp8Product(c, zeros, zeros);
  p[threadIdx.x] = static_cast<int32_t>(c[0]);
}

// More shared arrays than any block may have.
__global__ void LargeArray(Ints p) {
  FDSD_SHARED(int32_t, s, 13 << 10);
  s[threadIdx.x] = 1;
  p[threadIdx.x] = s[threadIdx.x];
}

LaunchShape WithDynamic(int32_t num_bytes) { return {dim3(1), dim3(kThreads), num_bytes}; }

const LaunchShape kOneBlock{dim3(1), dim3(kThreads)};
const LaunchShape kWarpgroup{dim3(1), dim3(128)};
const LaunchShape kTwoBlocks{dim3(2), dim3(kThreads)};

fdsd::Error RunFault(const char* name, Ints p) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("shared race")) return Launch<SharedRace>(kOneBlock, nullptr, p, false);
  if (is("shared, waited")) return Launch<SharedRace>(kOneBlock, nullptr, p, true);
  if (is("write after read")) return Launch<WriteAfterRead>(kOneBlock, nullptr, p, false);
  if (is("write after read, waited")) return Launch<WriteAfterRead>(kOneBlock, nullptr, p, true);
  if (is("published")) return Launch<Publish>(kTwoBlocks, nullptr, p, true, false);
  if (is("published with no barrier")) return Launch<Publish>(kTwoBlocks, nullptr, p, false, false);
  if (is("published for another block")) return Launch<Publish>(kTwoBlocks, nullptr, p, true, true);
  if (is("same element")) return Launch<SameElement>(kOneBlock, nullptr, p);
  if (is("neighbour bytes")) return Launch<NeighbourBytes>(kOneBlock, nullptr, p);
  if (is("byte, then its word")) return Launch<BytesOfAWord>(kOneBlock, nullptr, p, false, true);
  if (is("word, then its byte")) return Launch<BytesOfAWord>(kOneBlock, nullptr, p, true, false);
  if (is("bytes and their word, waited")) return Launch<BytesOfAWord>(kOneBlock, nullptr, p, true, true);
  if (is("of the block before")) return Launch<OfBlockBefore>(kTwoBlocks, nullptr, p);
  if (is("block race")) return Launch<BlockRace>(kTwoBlocks, nullptr, p, false);
  if (is("blocks apart")) return Launch<BlockRace>(kTwoBlocks, nullptr, p, true);
  if (is("read of other block")) return Launch<ReadOfOtherBlock>(kTwoBlocks, nullptr, p);
  if (is("warp race")) return Launch<WarpExchange>(kOneBlock, nullptr, p, false, 1);
  if (is("warp, waited")) return Launch<WarpExchange>(kOneBlock, nullptr, p, true, 1);
  if (is("two warps")) return Launch<WarpExchange>(kOneBlock, nullptr, p, true, 32);
  if (is("counter, once plain")) return Launch<Counter>(kOneBlock, nullptr, p, true);
  if (is("counter")) return Launch<Counter>(kTwoBlocks, nullptr, p, false);
  if (is("reads behind")) return Launch<Outside>(kOneBlock, nullptr, p, int64_t{kThreads}, false);
  if (is("writes behind")) return Launch<Outside>(kOneBlock, nullptr, p, int64_t{kThreads}, true);
  if (is("writes far before")) return Launch<Outside>(kOneBlock, nullptr, p, int64_t{-1} << 33, true);
  if (is("reads the last")) return Launch<Outside>(kOneBlock, nullptr, p, int64_t{kThreads - 1}, false);
  if (is("behind shared")) return Launch<OutsideShared>(kOneBlock, nullptr, p, 1);
  if (is("before shared")) return Launch<OutsideShared>(kOneBlock, nullptr, p, -1);
  if (is("no dynamic memory")) return Launch<OutsideDynamic>(kOneBlock, nullptr, p);
  if (is("misaligned")) return Launch<Misaligned>(kOneBlock, nullptr, p);
  if (is("unwritten")) return Launch<Unwritten>(kOneBlock, nullptr, p);
  if (is("half a barrier")) return Launch<HalfABarrier>(kOneBlock, nullptr, p);
  if (is("two barriers")) return Launch<TwoBarriers>(kOneBlock, nullptr, p);
  if (is("half a warp")) return Launch<HalfAWarp>(kOneBlock, nullptr, p);
  if (is("some lanes")) return Launch<SomeLanes>(kOneBlock, nullptr, p);
  if (is("copy not waited for")) return Launch<CopyThenRead>(kOneBlock, nullptr, p, false, true, 0);
  if (is("copy of another, no barrier")) return Launch<CopyThenRead>(kOneBlock, nullptr, p, true, false, 1);
  if (is("copy of its own, waited")) return Launch<CopyThenRead>(kOneBlock, nullptr, p, true, false, 0);
  if (is("copy of another, waited")) return Launch<CopyThenRead>(kOneBlock, nullptr, p, true, true, 1);
  if (is("copy over what is read")) return Launch<CopyOverRead>(kOneBlock, nullptr, p, false);
  if (is("copy over what was read")) return Launch<CopyOverRead>(kOneBlock, nullptr, p, true);
  for (const bool is_float : {false, true}) {
    const auto run = [&](bool fences, bool begins, bool writes_over, bool waits, bool copies = true) {
      using namespace fdsd::cuda;
      return is_float ? Launch<WarpgroupProduct<Bf16Products>>(kWarpgroup, nullptr, p, fences, begins, writes_over,
                                                               waits, copies)
                      : Launch<WarpgroupProduct<IntegerProducts>>(kWarpgroup, nullptr, p, fences, begins, writes_over,
                                                                  waits, copies);
    };
    const char* const kind = is_float ? "product of floats" : "product";
    const size_t length = std::strlen(kind);
    if (std::strncmp(name, kind, length) != 0) continue;
    const auto what = [&](const char* other) { return std::strcmp(name + length, other) == 0; };
    if (what("")) return run(true, true, false, true);
    if (what(" of what is written")) return run(true, true, false, true, false);
    if (what(" of what is not fenced")) return run(false, true, false, true);
    if (what(" of what is written and not fenced")) return run(false, true, false, true, false);
    if (what(" before its registers")) return run(true, false, false, true);
    if (what(" written over")) return run(true, true, true, true);
    if (what(" not waited for")) return run(true, true, false, false);
  }
  if (is("bulk copy")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{});
  if (is("bulk copy not waited for")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.waits = false});
  if (is("wait for another phase")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.phase_bit = 1});
  if (is("more bytes than expected"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.num_more_expected = -16});
  if (is("fewer bytes than expected"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.num_more_expected = 16});
  if (is("bulk copy to no multiple of 16")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.to = 2});
  if (is("bulk copy from no multiple of 16")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.from = 1});
  if (is("bulk copy of no multiple of 16")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.num_bytes = 248});
  if (is("bulk copy from behind")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.from = 4});
  if (is("no barrier of bytes")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.initializes = false});
  if (is("a barrier twice")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.initializes_again = true});
  if (is("a barrier not fenced")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.fences = false});
  if (is("a barrier not met for")) return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.meets = false});
  if (is("bulk copy over what is read"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.meets_readers = false});
  if (is("bulk copy over what is not fenced"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.fenced_by = BulkFault::kNone});
  if (is("bulk copy, fenced too early"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.fenced_by = BulkFault::kEarly});
  if (is("bulk copy, fenced elsewhere"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.fenced_by = BulkFault::kOther});
  if (is("bulk copy, fenced by writers"))
    return Launch<BulkCopy>(kOneBlock, nullptr, p, BulkFault{.fenced_by = BulkFault::kWriters});
  if (is("copy to global memory")) return Launch<CopyToGlobal>(kOneBlock, nullptr, p);
  if (is("part of a warp in a block")) return Launch<Fill>(LaunchShape{dim3(1), dim3(48)}, nullptr, p);
  if (is("too many threads")) return Launch<Fill>(LaunchShape{dim3(1), dim3(2048)}, nullptr, p);
  const int32_t all_bytes = fdsd::emulation::ChipNow().block_bytes;
  if (is("too much shared memory")) return Launch<Fill>(WithDynamic(all_bytes + 1), nullptr, p);
  if (is("all shared memory")) return Launch<Fill>(WithDynamic(all_bytes), nullptr, p);
  if (is("too much together with arrays"))
    return Launch<SharedRace>(WithDynamic(all_bytes - kThreads * 4 + 1), nullptr, p, true);
  if (is("all together with arrays"))
    return Launch<SharedRace>(WithDynamic(all_bytes - kThreads * 4), nullptr, p, true);
  if (is("too large arrays")) return Launch<LargeArray>(kOneBlock, nullptr, p);
  if (is("product of e4m3")) return Launch<Fp8Product>(kOneBlock, nullptr, p);
  if (is("memory of the host")) {
    int32_t host[kThreads] = {};
    return Launch<Fill>(kOneBlock, nullptr, Ints(host));
  }
  if (is("two launches")) {
    if (fdsd::Error error = Launch<Fill>(kOneBlock, nullptr, p)) return error;
    return Launch<WriteAfterRead>(kOneBlock, nullptr, p, true);
  }
  return "name: expected one of this file's, got another";
}

}  // namespace

// Runs one of them on a chip of this generation, with memory of kThreads int32; returns what the emulation says of it.
FDSD_EXPORT fdsd::Error run_fault(const char* name, int32_t architecture) {
  fdsd::emulation::Architecture() = architecture;
  void* memory = fdsd::emulation::Allocate(kThreads * sizeof(int32_t));
  std::memset(memory, 0, kThreads * sizeof(int32_t));
  const fdsd::Error error = RunFault(name, Ints(memory));
  fdsd::emulation::Free(memory);
  return error;
}
