#pragma once
// Products of a warpgroup whose B lies in shared memory row by row of the summed dimension, as the values of a cache
// do: the instruction turns it round. Only for elements of two bytes.
#include "warpgroup.h"

namespace fdsd::cuda {

// Columns of B that a row of 64 bytes has. Where there are more columns, each such panel has its own rows, laid out as
// warpgroup.h says.
constexpr int kPanelColumns = kWarpgroupRowBytes / 2;

#if defined(FDSD_EMULATED)

// c += A . B, where `rows` are 16 rows of B, those of the summed dimension. Its columns 32 p .. 32 p + 31 begin p *
// kPanelBytes after `rows`. A and c as of AddWarpgroupProduct, c[4 * j ..] of columns 8 j .. 8 j + 7. After the wait.
template <typename Kind, int kColumns, int kPanelBytes>
void AddWarpgroupColumns(typename Kind::Element* c, const uint32_t* a, DevicePtr<const uint8_t> rows,
                         std::source_location where = std::source_location::current()) {
  constexpr int kChunk = 16;
  constexpr int kChunkColumns = kChunk / 2;
  constexpr int kRows = 2 * kMatrixWords;
  if (reinterpret_cast<uintptr_t>(rows.address()) % 128 != 0) emulation::Fail("rows of a product are not aligned");
  stand_in::Operands own{{a[0], a[1], a[2], a[3]}, {}};
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &own, sizeof(own), false, where);
  const int lane = static_cast<int>(emulation::Lane());
  const auto chunk_of = [&](int row, int chunk) {
    return rows.address() + chunk / 4 * kPanelBytes + row * kWarpgroupRowBytes + (chunk % 4 ^ (row / 2 % 4)) * kChunk;
  };
  // A warp reads all rows, each lane some of them.
  for (int i = lane; i < kRows * kColumns / kChunkColumns; i += kWarpSize)
    emulation::ReadForProducts(rows.allocation(), chunk_of(i % kRows, i / kRows), kChunk);
  auto* const sums =
      static_cast<typename Kind::Element*>(emulation::StartedElements(c, kColumns / kMatrixColumns * size_t{4}));
  stand_in::Elements<Kind> elements[2];
  stand_in::ReadRows(lanes, lane, elements);
  for (int i = 0; i < kColumns / 4; ++i) {
    const int chunk = i / 2;
    stand_in::Elements<Kind> column;
    for (int row = 0; row < kRows; ++row) {
      uint16_t bits;
      std::memcpy(&bits, chunk_of(row, chunk) + 2 * (lane % 4 * 2 + i % 2), sizeof(bits));
      column.of[row] = stand_in::Rules<Kind>::OfB(bits, 0);
    }
    for (int part = 0; part < 2; ++part)
      stand_in::AddElements(&sums[4 * chunk + 2 * part + i % 2], elements[part], column);
  }
}

#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define FDSD_EIGHT(c) \
  "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3]), "+f"((c)[4]), "+f"((c)[5]), "+f"((c)[6]), "+f"((c)[7])
#define FDSD_SIXTEEN(c) FDSD_EIGHT(c), FDSD_EIGHT((c) + 8)
#define FDSD_WORDS(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define FDSD_PRODUCT(shape) "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned." shape " "

__device__ __forceinline__ void AddColumnsOf(Bf16Products, std::integral_constant<int, 32>, float* c, const uint32_t* a,
                                             uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n32k16.f32.bf16.bf16")
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n"
      : FDSD_SIXTEEN(c)
      : FDSD_WORDS(a), "l"(rows));
}

__device__ __forceinline__ void AddColumnsOf(Bf16Products, std::integral_constant<int, 64>, float* c, const uint32_t* a,
                                             uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n64k16.f32.bf16.bf16")
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : FDSD_SIXTEEN(c), FDSD_SIXTEEN(c + 16)
      : FDSD_WORDS(a), "l"(rows));
}

__device__ __forceinline__ void AddColumnsOf(Bf16Products, std::integral_constant<int, 128>, float* c,
                                             const uint32_t* a, uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n128k16.f32.bf16.bf16")
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : FDSD_SIXTEEN(c), FDSD_SIXTEEN(c + 16), FDSD_SIXTEEN(c + 32), FDSD_SIXTEEN(c + 48)
      : FDSD_WORDS(a), "l"(rows));
}

#undef FDSD_EIGHT
#undef FDSD_SIXTEEN
#undef FDSD_WORDS
#undef FDSD_PRODUCT

template <typename Kind, int kColumns, int kPanelBytes>
__device__ __forceinline__ void AddWarpgroupColumns(typename Kind::Element* c, const uint32_t* a, const uint8_t* rows) {
  // The descriptor: where B begins, 8 rows that follow lie 512 bytes on, the next 32 columns a panel on, chunks changed
  // round within 64 bytes.
  constexpr uint64_t kLayout = uint64_t{2} << 62 | uint64_t{512 / 16} << 32 | uint64_t{kPanelBytes / 16} << 16;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
  AddColumnsOf(Kind{}, std::integral_constant<int, kColumns>{}, c, a, kLayout | (address & 0x3ffffu) >> 4);
}

#else  // never called

template <typename Kind, int kColumns, int kPanelBytes>
__device__ __forceinline__ void AddWarpgroupColumns(typename Kind::Element*, const uint32_t*, const uint8_t*) {}

#endif

}  // namespace fdsd::cuda
