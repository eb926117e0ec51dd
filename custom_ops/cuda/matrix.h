#pragma once
// Matrix products of a warp and asynchronous copies: the instructions that generations of GPUs differ in, and under the
// emulation a stand-in of each. Fragments are those of the PTX instruction set, chapter on mma: with g = lane / 4 and t
// = lane % 4, words of 4 bytes along the summed dimension,
//   a[0..3]   words (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4) of A, 16 rows of 8 words
//   b[0..1]   words t and t + 4 of column g of B, 8 columns of 8 words
//   c[0..3]   elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of C, 16 x 8
#include "numbers.h"

namespace fdsd::cuda {

constexpr int kMatrixRows = 16;
constexpr int kMatrixColumns = 8;
constexpr int kMatrixWords = 8;

#if defined(FDSD_EMULATED)

namespace stand_in {

struct Operands {
  uint32_t a[4];
  uint32_t b[2];
};

// Word i of a row of A or a column of B, taken from the lanes that hold it.
inline uint32_t RowWord(const uint64_t* lanes, int row, int i) {
  const Operands x = emulation::FromLane<Operands>(lanes, static_cast<unsigned>(row % 8 * 4 + i % 4));
  return x.a[i / 4 * 2 + row / 8];
}
inline uint32_t ColumnWord(const uint64_t* lanes, int column, int i) {
  return emulation::FromLane<Operands>(lanes, static_cast<unsigned>(column * 4 + i % 4)).b[i / 4];
}

inline double ToDouble(uint32_t half) { return static_cast<double>(__uint_as_float(half << 16)); }
// Products of floats with so few bits are exact. What order the chip adds them in is not known; here it is one sum.
inline double Dot(uint32_t a, uint32_t b, double sum) {
  return sum + ToDouble(a & 0xffffu) * ToDouble(b & 0xffffu) + ToDouble(a >> 16) * ToDouble(b >> 16);
}
inline double DotHalf16(uint32_t a, uint32_t b, double sum) {
  for (int i = 0; i < 32; i += 16) {
    const half16 x{static_cast<uint16_t>(a >> i)};
    const half16 y{static_cast<uint16_t>(b >> i)};
    sum += double{ToFloat(x)} * double{ToFloat(y)};
  }
  return sum;
}
inline int64_t Dot(uint32_t a, uint32_t b, int64_t sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int64_t>(a >> i & 0xffu) * static_cast<int8_t>(b >> i);
  return sum;
}
inline int64_t DotSigned(uint32_t a, uint32_t b, int64_t sum) {
  for (int i = 0; i < 32; i += 8)
    sum += static_cast<int64_t>(static_cast<int8_t>(a >> i)) * static_cast<int8_t>(b >> i);
  return sum;
}
inline double DotFp8(uint32_t a, uint32_t b, double sum) {
  for (int i = 0; i < 32; i += 8) sum += double{FromE4m3(a >> i & 0xffu)} * double{FromE4m3(b >> i & 0xffu)};
  return sum;
}

template <typename Sum, Sum (*dot)(uint32_t, uint32_t, Sum), typename T>
void AddProduct(T* c, const uint32_t* a, const uint32_t* b, std::source_location where) {
  const Operands own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &own, sizeof(own), false, where);
  const int lane = static_cast<int>(emulation::Lane());
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    Sum sum = 0;
    for (int word = 0; word < kMatrixWords; ++word)
      sum = dot(RowWord(lanes, row, word), ColumnWord(lanes, column, word), sum);
    c[i] = static_cast<T>(static_cast<Sum>(c[i]) + sum);
  }
}

}  // namespace stand_in

inline void AddMatrixProduct(float* c, const uint32_t* a, const uint32_t* b,
                             std::source_location where = std::source_location::current()) {
  stand_in::AddProduct<double, stand_in::Dot>(c, a, b, where);
}
inline void AddMatrixProduct(int32_t* c, const uint32_t* a, const uint32_t* b,
                             std::source_location where = std::source_location::current()) {
  stand_in::AddProduct<int64_t, stand_in::Dot>(c, a, b, where);
}
inline void AddSignedProduct(int32_t* c, const uint32_t* a, const uint32_t* b,
                             std::source_location where = std::source_location::current()) {
  stand_in::AddProduct<int64_t, stand_in::DotSigned>(c, a, b, where);
}
// The same of half as many words: a[0], a[1] and b are words t.
inline void AddSignedHalfProduct(int32_t* c, const uint32_t* a, uint32_t b,
                                 std::source_location where = std::source_location::current()) {
  const uint32_t whole_a[4] = {a[0], a[1], 0, 0};
  const uint32_t whole_b[2] = {b, 0};
  AddSignedProduct(c, whole_a, whole_b, where);
}
inline void AddHalf16Product(float* c, const uint32_t* a, const uint32_t* b,
                             std::source_location where = std::source_location::current()) {
  stand_in::AddProduct<double, stand_in::DotHalf16>(c, a, b, where);
}
constexpr int kFp8Architecture = 89;  // the first with products of e4m3
inline bool HasFp8Products() { return emulation::Architecture() >= kFp8Architecture; }
inline void AddNativeFp8Product(float* c, const uint32_t* a, const uint32_t* b,
                                std::source_location where = std::source_location::current()) {
  if (!HasFp8Products()) emulation::Fail("multiplies e4m3 on sm_%d, which cannot", emulation::Architecture());
  stand_in::AddProduct<double, stand_in::DotFp8>(c, a, b, where);
}

// Two bfloat16 times 2^120, exactly, from subnormal numbers too.
inline uint32_t TimesPower120(uint32_t pair) {
  const auto times = [](uint32_t bits) { return __float_as_uint(__uint_as_float(bits) * 0x1p120f); };
  return times(pair << 16) >> 16 | times(pair & 0xffff0000u);
}

// The fragment b[0..1] of 16 rows of 8 bfloat16 or float16 in shared memory, whose columns are to be multiplied: lane i
// gives where row i % 16 begins, aligned to 16 bytes.
inline void LoadColumns(DevicePtr<const bf16> row, uint32_t* b,
                        std::source_location where = std::source_location::current()) {
  emulation::Check(row.allocation(), row.address(), kMatrixColumns * sizeof(bf16), emulation::Access::kRead);
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &row, sizeof(row), false, where);
  const unsigned lane = emulation::Lane();
  for (unsigned half = 0; half < 2; ++half) {
    uint32_t word = 0;
    for (unsigned i = 0; i < 2; ++i) {
      const auto from = emulation::FromLane<DevicePtr<const bf16>>(lanes, 8 * half + lane % 4 * 2 + i);
      word |= static_cast<uint32_t>(from[lane / 4].bits) << (16 * i);
    }
    b[half] = word;
  }
}

// Words of four matrices of 8 rows of 16 bytes in shared memory: lane i gives where row i % 8 of matrix i / 8 begins,
// aligned to 16 bytes, and gets word lane % 4 of row lane / 4 of matrix m in words[m].
inline void LoadRowWords(DevicePtr<const uint8_t> row, uint32_t* words,
                         std::source_location where = std::source_location::current()) {
  emulation::Check(row.allocation(), row.address(), sizeof(uint4), emulation::Access::kRead);
  const uint64_t* lanes = emulation::MeetWarp(kAllLanes, &row, sizeof(row), false, where);
  const unsigned lane = emulation::Lane();
  for (unsigned m = 0; m < 4; ++m) {
    const auto from = emulation::FromLane<DevicePtr<const uint8_t>>(lanes, 8 * m + lane / 4);
    std::memcpy(&words[m], from.address() + lane % 4 * sizeof(uint32_t), sizeof(uint32_t));
  }
}

// Copy kBytes (4, 8 or 16, and aligned so) to shared memory, or zeros where they are not there, while the thread goes
// on. They have arrived when the thread has waited for them; for other threads, after the next barrier.
template <int kBytes>
void CopyAsync(DevicePtr<uint8_t> to, DevicePtr<const uint8_t> from, bool is_there = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if (is_there) emulation::Check(from.allocation(), from.address(), kBytes, emulation::Access::kRead);
  emulation::StartCopy(to.allocation(), to.address(), is_there ? from.address() : nullptr, kBytes);
}

// The thread's copies since the last CommitCopies become a group, perhaps an empty one.
inline void CommitCopies() { emulation::CommitCopies(); }

// Wait until the thread's groups have arrived, but for the last kPending.
template <int kPending>
void WaitForCopies() {
  emulation::WaitForCopies(kPending);
}

#else

__device__ __forceinline__ void LoadRowWords(const uint8_t* row, uint32_t* words) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint8_t* to, const uint8_t* from, bool is_there = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int num_bytes = is_there ? kBytes : 0;
  if constexpr (kBytes == 16) {  // past the first-level cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(num_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(kBytes), "r"(num_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void LoadColumns(const bf16* row, uint32_t* b) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t TimesPower120(uint32_t pair) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));
  return product;
}

// c += A . B with words of two bfloat16. All lanes of a warp.
__device__ __forceinline__ void AddMatrixProduct(float* c, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with words of two float16.
__device__ __forceinline__ void AddHalf16Product(float* c, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A . B with words of four unsigned (A) and four signed (B) bytes. All lanes of a warp.
__device__ __forceinline__ void AddMatrixProduct(int32_t* c, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with signed bytes in both.
__device__ __forceinline__ void AddSignedProduct(int32_t* c, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of half as many words: a[0], a[1] and b are words t.
__device__ __forceinline__ void AddSignedHalfProduct(int32_t* c, const uint32_t* a, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ constexpr bool HasFp8Products() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return true;
#else
  return false;
#endif
}
__device__ __forceinline__ void AddNativeFp8Product(float* c, const uint32_t* a, const uint32_t* b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#endif

// Bytes `first` and first + 2 of a word of e4m3 as bfloat16, which have the same numbers; no NaNs. Sign, exponent and
// fraction in their places make the number times 2^-120.
__device__ __forceinline__ uint32_t Bf16Codes(uint32_t word, int first) {
  const uint32_t upper = first == 0 ? word << 8 : word;
  return TimesPower120((upper & 0x80008000u) | (upper >> 4 & 0x07f007f0u));
}

// The word of bfloat16 that has the same numbers as a half of a word of e4m3.
__device__ __forceinline__ uint32_t Bf16Word(uint32_t word, int half) {
  const uint32_t codes = word >> (16 * half);
  return __float_as_uint(FromE4m3(codes & 0xffu)) >> 16 | (__float_as_uint(FromE4m3(codes >> 8 & 0xffu)) & 0xffff0000u);
}

// c += A . B with words of four e4m3. All lanes of a warp. Where the chip has no such product, two of bfloat16, which
// have the same numbers, and add them in another order.
__device__ __forceinline__ void AddFp8Product(float* c, const uint32_t* a, const uint32_t* b) {
  if (HasFp8Products()) {
    AddNativeFp8Product(c, a, b);
  } else {
    const uint32_t low_a[4] = {Bf16Word(a[0], 0), Bf16Word(a[1], 0), Bf16Word(a[2], 0), Bf16Word(a[3], 0)};
    const uint32_t low_b[2] = {Bf16Word(b[0], 0), Bf16Word(b[1], 0)};
    AddMatrixProduct(c, low_a, low_b);
    const uint32_t high_a[4] = {Bf16Word(a[0], 1), Bf16Word(a[1], 1), Bf16Word(a[2], 1), Bf16Word(a[3], 1)};
    const uint32_t high_b[2] = {Bf16Word(b[0], 1), Bf16Word(b[1], 1)};
    AddMatrixProduct(c, high_a, high_b);
  }
}

}  // namespace fdsd::cuda
