#pragma once
// Products of a warpgroup, four warps, on Hopper: A from registers, B from shared memory. The instructions themselves
// (warpgroup_instructions.h), and under the emulation a stand-in of each. How floats are added within one is the chip's
// own and not that of a warp's product (matrix.h), so a sum is made by one sort of them alone.
#include "matrix.h"
#include "warpgroup_instructions.h"

namespace fdsd::cuda {

constexpr int kWarpgroupWarps = 4;

// Where rows of B lie: 64 bytes each, one after the other, and chunk c (16 bytes) of row r at place c ^ r / 2 % 4. The
// first begins at a multiple of 512 bytes.
constexpr int kWarpgroupRowBytes = 64;
constexpr int kWarpgroupAlignment = 512;

#if defined(FDSD_EMULATED)

inline bool HasWarpgroupProducts() { return emulation::HasWarpgroups(); }

namespace stand_in {

// The number with so few fraction bits that is next to x towards zero.
inline float TowardsZero(double x, int fraction_bits) {
  constexpr int kFractionBits = 52;
  if (!std::isfinite(x)) return static_cast<float>(x);
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits &= ~uint64_t{0} << (kFractionBits - fraction_bits);
  std::memcpy(&x, &bits, sizeof(bits));
  return static_cast<float>(x);
}

// What a chip makes of element i of a word of A, of one of B, and of the sum of their products in the end. Products of
// floats with so few bits are exact. Sums of floats are cut off, those of e4m3 to 13 bits, as was found on H100s.
// Source: P. Xie et al., MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores, 2025,
// arXiv:2511.10909.
template <typename Kind>
struct Rules;
template <>
struct Rules<IntegerProducts> {
  using Sum = int64_t;
  static constexpr int kPerWord = 4;
  static Sum OfA(uint32_t word, int i) { return static_cast<uint8_t>(word >> 8 * i); }
  static Sum OfB(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }
  static int32_t Round(Sum sum) { return static_cast<int32_t>(sum); }
};
template <>
struct Rules<Bf16Products> {
  using Sum = double;
  static constexpr int kPerWord = 2;
  static Sum OfA(uint32_t word, int i) { return ToDouble(word >> 16 * i & 0xffffu); }
  static Sum OfB(uint32_t word, int i) { return OfA(word, i); }
  static float Round(Sum sum) { return TowardsZero(sum, 23); }
};
template <>
struct Rules<Half16Products> {
  using Sum = double;
  static constexpr int kPerWord = 2;
  static Sum OfA(uint32_t word, int i) { return double{ToFloat(half16{static_cast<uint16_t>(word >> 16 * i)})}; }
  static Sum OfB(uint32_t word, int i) { return OfA(word, i); }
  static float Round(Sum sum) { return TowardsZero(sum, 23); }
};
template <>
struct Rules<Fp8Products> {
  using Sum = double;
  static constexpr int kPerWord = 4;
  static Sum OfA(uint32_t word, int i) { return double{FromE4m3(word >> 8 * i & 0xffu)}; }
  static Sum OfB(uint32_t word, int i) { return OfA(word, i); }
  static float Round(Sum sum) { return TowardsZero(sum, 13); }
};

// Elements of the summed dimension as numbers, which several sums have in common.
template <typename Kind>
struct Elements {
  static constexpr int kCount = kMatrixWords * Rules<Kind>::kPerWord;
  typename Rules<Kind>::Sum of[kCount];
};

// The two rows of A whose elements of C a lane has.
template <typename Kind>
void ReadRows(const uint64_t* lanes, int lane, Elements<Kind>* rows) {
  constexpr int kPerWord = Rules<Kind>::kPerWord;
  for (int part = 0; part < 2; ++part) {
    for (int word = 0; word < kMatrixWords; ++word) {
      const uint32_t bits = RowWord(lanes, lane / 4 + 8 * part, word);
      for (int i = 0; i < kPerWord; ++i) rows[part].of[word * kPerWord + i] = Rules<Kind>::OfA(bits, i);
    }
  }
}

template <typename Kind>
void AddElements(typename Kind::Element* element, const Elements<Kind>& a, const Elements<Kind>& b) {
  auto sum = static_cast<typename Rules<Kind>::Sum>(*element);
  for (int i = 0; i < Elements<Kind>::kCount; ++i) sum += a.of[i] * b.of[i];
  *element = Rules<Kind>::Round(sum);
}

}  // namespace stand_in

// What the thread's copies brought is there for products, after the next barrier.
inline void FenceCopies() { emulation::FenceProxies(); }

// Before products: registers of A and the kCount elements are written.
template <int kCount, typename T>
void BeginWarpgroupProducts(T*) {
  emulation::BeginProducts();
}

// Words of A are computed before what follows, which makes registers ready for products.
template <int kCount>
void HoldWords(uint32_t*) {}

// c += A . B: warp w of the warpgroup has rows 16 w .. 16 w + 15 of A, in fragments as of a warp's product. `rows` are
// kRows rows of B, of which bytes [32 * step, 32 * step + 32) are multiplied. c[4 * j ..] are the elements of rows 8 j
// .. 8 j + 7 of B, as of a warp's product. After the wait.
template <typename Kind, int kRows>
void AddWarpgroupProduct(typename Kind::Element* c, const uint32_t* a, DevicePtr<const uint8_t> rows, int step,
                         std::source_location where = std::source_location::current()) {
  using Rules = stand_in::Rules<Kind>;
  constexpr int kChunk = 16;
  constexpr int kPerWord = Rules::kPerWord;
  if (reinterpret_cast<uintptr_t>(rows.address()) % 128 != 0) emulation::Fail("rows of a product are not aligned");
  stand_in::Operands own{{a[0], a[1], a[2], a[3]}, {}};
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &own, sizeof(own), false, where);
  const int lane = static_cast<int>(emulation::Lane());
  const auto chunk_of = [&](int row, int half) {
    return rows.address() + row * kWarpgroupRowBytes + ((2 * step + half) ^ (row / 2 % 4)) * kChunk;
  };
  // A warp reads all rows, each lane some of them.
  for (int i = lane; i < 2 * kRows; i += kWarpSize)
    emulation::ReadForProducts(rows.allocation(), chunk_of(i / 2, i % 2), kChunk);
  auto* const sums =
      static_cast<typename Kind::Element*>(emulation::StartedElements(c, kRows / kMatrixColumns * size_t{4}));
  stand_in::Elements<Kind> columns[2];
  stand_in::ReadRows(lanes, lane, columns);
  for (int j = 0; j < kRows / kMatrixColumns; ++j) {
    for (int i = 0; i < 2; ++i) {
      const int row = j * kMatrixColumns + lane % 4 * 2 + i;
      uint32_t words[kMatrixWords];
      for (int half = 0; half < 2; ++half) std::memcpy(words + half * (kMatrixWords / 2), chunk_of(row, half), kChunk);
      stand_in::Elements<Kind> elements;
      for (int k = 0; k < stand_in::Elements<Kind>::kCount; ++k)
        elements.of[k] = Rules::OfB(words[k / kPerWord], k % kPerWord);
      for (int part = 0; part < 2; ++part) stand_in::AddElements(&sums[4 * j + 2 * part + i], columns[part], elements);
    }
  }
}

// Wait until the thread's products, all with these kCount elements, have ended.
template <int kCount, typename T>
void WaitForWarpgroupProducts(T*) {
  emulation::WaitForProducts();
}

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
__device__ __forceinline__ void HoldElement(int32_t* c) { asm volatile("" : "+r"(*c)::"memory"); }
__device__ __forceinline__ void HoldElement(float* c) { asm volatile("" : "+f"(*c)::"memory"); }

template <int kCount>
__device__ __forceinline__ void HoldWords(uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

template <int kCount, typename T>
__device__ __forceinline__ void BeginWarpgroupProducts(T* c) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) HoldElement(c + i);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <typename Kind, int kRows>
__device__ __forceinline__ void AddWarpgroupProduct(typename Kind::Element* c, const uint32_t* a, const uint8_t* rows,
                                                    int step) {
  // The descriptor: where B begins, 8 rows that follow lie 512 bytes on, chunks changed round within 64 bytes.
  constexpr uint64_t kLayout = uint64_t{2} << 62 | uint64_t{512 / 16} << 32 | uint64_t{1} << 16;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + 32u * static_cast<uint32_t>(step);
  AddProductOf(Kind{}, std::integral_constant<int, kRows>{}, c, a, kLayout | (address & 0x3ffffu) >> 4);
}

template <int kCount, typename T>
__device__ __forceinline__ void WaitForWarpgroupProducts(T* c) {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) HoldElement(c + i);
}

#else  // never called

__device__ __forceinline__ void FenceCopies() {}
template <int kCount>
__device__ __forceinline__ void HoldWords(uint32_t*) {}
template <int kCount, typename T>
__device__ __forceinline__ void BeginWarpgroupProducts(T*) {}
template <typename Kind, int kRows>
__device__ __forceinline__ void AddWarpgroupProduct(typename Kind::Element*, const uint32_t*, const uint8_t*, int) {}
template <int kCount, typename T>
__device__ __forceinline__ void WaitForWarpgroupProducts(T*) {}

#endif
#endif

// For launchers: whether HasWarpgroupProducts in what the current device runs.
inline bool DeviceHasWarpgroupProducts() {
  int device = 0;
  int major = 0;
  int minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace fdsd::cuda
