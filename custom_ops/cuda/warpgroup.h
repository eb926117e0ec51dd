#pragma once
// Products of a warpgroup, four warps, on Hopper: A from registers, B from shared memory. The instructions themselves,
// and under the emulation a stand-in of each. Those of integers only: their sums are exact, so that it is nobody's
// concern whether a row meets these or the products of a warp (matrix.h).
#include "matrix.h"

namespace fdsd::cuda {

constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupRows = 64;      // of B
constexpr int kWarpgroupElements = 32;  // that a thread has

// Where rows of B lie: 64 bytes each, one behind the other, and chunk c (16 bytes) of row r at place c ^ r / 2 % 4. The
// first begins at a multiple of 512 bytes.
constexpr int kWarpgroupRowBytes = 64;
constexpr int kWarpgroupAlignment = 512;

#if defined(FDSD_EMULATED)

inline bool HasWarpgroupProducts() { return emulation::Architecture() == 90; }

// What the thread's copies brought is there for products, behind the next barrier.
inline void FenceCopies() { emulation::FenceCopies(); }

// Before products: registers of A and the elements are written.
inline void BeginWarpgroupProducts(int32_t*) { emulation::BeginProducts(); }

// c += A . B: warp w of the warpgroup has rows 16 w .. 16 w + 15 of A, in fragments as of a warp's product with words
// of four unsigned bytes. `rows` are 64 rows of B, of which bytes [32 * step, 32 * step + 32) are multiplied, as signed
// bytes. c[4 * j ..] are the elements of rows 8 j .. 8 j + 7 of B, as of a warp's product. After the wait.
inline void AddWarpgroupProduct(int32_t* c, const uint32_t* a, DevicePtr<const uint8_t> rows, int step,
                                std::source_location where = std::source_location::current()) {
  constexpr int kChunk = 16;
  if (reinterpret_cast<uintptr_t>(rows.address()) % 128 != 0) emulation::Fail("rows of a product are not aligned");
  stand_in::Operands own{{a[0], a[1], a[2], a[3]}, {}};
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &own, sizeof(own), false, where);
  const int lane = static_cast<int>(emulation::Lane());
  int32_t* const sums = emulation::StartedElements(c);
  for (int j = 0; j < kWarpgroupRows / kMatrixColumns; ++j) {
    for (int i = 0; i < 2; ++i) {
      const int row = j * kMatrixColumns + lane % 4 * 2 + i;
      uint32_t words[kMatrixWords];
      for (int half = 0; half < 2; ++half) {
        const int place = (2 * step + half) ^ (row / 2 % 4);
        const uint8_t* const chunk = rows.address() + row * kWarpgroupRowBytes + place * kChunk;
        emulation::ReadForProducts(rows.allocation(), chunk, kChunk);
        std::memcpy(words + half * (kMatrixWords / 2), chunk, kChunk);
      }
      for (int part = 0; part < 2; ++part) {
        int64_t sum = sums[4 * j + 2 * part + i];
        for (int word = 0; word < kMatrixWords; ++word)
          sum = stand_in::Dot(stand_in::RowWord(lanes, lane / 4 + 8 * part, word), words[word], sum);
        sums[4 * j + 2 * part + i] = static_cast<int32_t>(sum);
      }
    }
  }
}

// Wait until the thread's products, all with these elements, have ended.
inline void WaitForWarpgroupProducts(int32_t*) { emulation::WaitForProducts(); }

#else

__device__ __forceinline__ constexpr bool HasWarpgroupProducts() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return true;
#else
  return false;
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void FenceCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler moves no use of the elements across.
__device__ __forceinline__ void HoldElements(int32_t* c) {
#pragma unroll
  for (int i = 0; i < kWarpgroupElements; ++i) asm volatile("" : "+r"(c[i])::"memory");
}

__device__ __forceinline__ void BeginWarpgroupProducts(int32_t* c) {
  HoldElements(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void AddWarpgroupProduct(int32_t* c, const uint32_t* a, const uint8_t* rows, int step) {
  // The descriptor: where B begins, 8 rows that follow lie 512 bytes on, chunks changed round within 64 bytes.
  constexpr uint64_t kLayout = uint64_t{2} << 62 | uint64_t{512 / 16} << 32 | uint64_t{1} << 16;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + 32u * static_cast<uint32_t>(step);
  const uint64_t descriptor = kLayout | (address & 0x3ffffu) >> 4;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p;\n}\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]), "+r"(c[8]),
        "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15]), "+r"(c[16]),
        "+r"(c[17]), "+r"(c[18]), "+r"(c[19]), "+r"(c[20]), "+r"(c[21]), "+r"(c[22]), "+r"(c[23]), "+r"(c[24]),
        "+r"(c[25]), "+r"(c[26]), "+r"(c[27]), "+r"(c[28]), "+r"(c[29]), "+r"(c[30]), "+r"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
}

__device__ __forceinline__ void WaitForWarpgroupProducts(int32_t* c) {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  HoldElements(c);
}

#else  // never called

__device__ __forceinline__ void FenceCopies() {}
__device__ __forceinline__ void BeginWarpgroupProducts(int32_t*) {}
__device__ __forceinline__ void AddWarpgroupProduct(int32_t*, const uint32_t*, const uint8_t*, int) {}
__device__ __forceinline__ void WaitForWarpgroupProducts(int32_t*) {}

#endif
#endif

}  // namespace fdsd::cuda
