#pragma once
// The sorts of products of a warpgroup, and Hopper's instruction for each sort and number of rows that is in use. Its
// operands: elements c, the thread's words of A, the descriptor of B.
#include <cstdint>
#include <type_traits>

namespace fdsd::cuda {

// Words of four unsigned (A) and four signed (B) bytes; of two bfloat16; of two float16; of four e4m3.
struct IntegerProducts {
  using Element = int32_t;
};
struct Bf16Products {
  using Element = float;
};
struct Half16Products {
  using Element = float;
};
struct Fp8Products {
  using Element = float;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define FDSD_EIGHT(kind, c) \
  kind((c)[0]), kind((c)[1]), kind((c)[2]), kind((c)[3]), kind((c)[4]), kind((c)[5]), kind((c)[6]), kind((c)[7])
#define FDSD_THIRTY_TWO(kind, c) \
  FDSD_EIGHT(kind, c), FDSD_EIGHT(kind, (c) + 8), FDSD_EIGHT(kind, (c) + 16), FDSD_EIGHT(kind, (c) + 24)
#define FDSD_WORDS(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
// How an instruction names so many sums, the words of A and the descriptor of B.
#define FDSD_FIRST_32                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FDSD_SUMS_8 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
#define FDSD_SUMS_32 "{" FDSD_FIRST_32 "}, {%32, %33, %34, %35}, %36, "
#define FDSD_SUMS_64                                                                   \
  "{" FDSD_FIRST_32                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, "
#define FDSD_PRODUCT(shape) "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned." shape " "

__device__ __forceinline__ void AddProductOf(IntegerProducts, std::integral_constant<int, 64>, int32_t* c,
                                             const uint32_t* a, uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n64k32.s32.u8.s8") FDSD_SUMS_32 "p;\n}\n"
               : FDSD_THIRTY_TWO("+r", c)
               : FDSD_WORDS(a), "l"(rows));
}

// Words of two numbers of a type.
#define FDSD_PAIR_PRODUCTS(Kind, type)                                                                              \
  __device__ __forceinline__ void AddProductOf(Kind, std::integral_constant<int, 16>, float* c, const uint32_t* a,  \
                                               uint64_t rows) {                                                     \
    asm volatile(FDSD_PRODUCT("m64n16k16.f32." type "." type) FDSD_SUMS_8 "p, 1, 1, 0;\n}\n"                        \
                 : FDSD_EIGHT("+f", c)                                                                              \
                 : FDSD_WORDS(a), "l"(rows));                                                                       \
  }                                                                                                                 \
                                                                                                                    \
  __device__ __forceinline__ void AddProductOf(Kind, std::integral_constant<int, 64>, float* c, const uint32_t* a,  \
                                               uint64_t rows) {                                                     \
    asm volatile(FDSD_PRODUCT("m64n64k16.f32." type "." type) FDSD_SUMS_32 "p, 1, 1, 0;\n}\n"                       \
                 : FDSD_THIRTY_TWO("+f", c)                                                                         \
                 : FDSD_WORDS(a), "l"(rows));                                                                       \
  }                                                                                                                 \
                                                                                                                    \
  __device__ __forceinline__ void AddProductOf(Kind, std::integral_constant<int, 128>, float* c, const uint32_t* a, \
                                               uint64_t rows) {                                                     \
    asm volatile(FDSD_PRODUCT("m64n128k16.f32." type "." type) FDSD_SUMS_64 "p, 1, 1, 0;\n}\n"                      \
                 : FDSD_THIRTY_TWO("+f", c), FDSD_THIRTY_TWO("+f", c + 32)                                          \
                 : FDSD_WORDS(a), "l"(rows));                                                                       \
  }

FDSD_PAIR_PRODUCTS(Bf16Products, "bf16")
FDSD_PAIR_PRODUCTS(Half16Products, "f16")

__device__ __forceinline__ void AddProductOf(Fp8Products, std::integral_constant<int, 16>, float* c, const uint32_t* a,
                                             uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n16k32.f32.e4m3.e4m3") FDSD_SUMS_8 "p, 1, 1;\n}\n"
               : FDSD_EIGHT("+f", c)
               : FDSD_WORDS(a), "l"(rows));
}

__device__ __forceinline__ void AddProductOf(Fp8Products, std::integral_constant<int, 64>, float* c, const uint32_t* a,
                                             uint64_t rows) {
  asm volatile(FDSD_PRODUCT("m64n64k32.f32.e4m3.e4m3") FDSD_SUMS_32 "p, 1, 1;\n}\n"
               : FDSD_THIRTY_TWO("+f", c)
               : FDSD_WORDS(a), "l"(rows));
}

#undef FDSD_EIGHT
#undef FDSD_THIRTY_TWO
#undef FDSD_WORDS
#undef FDSD_FIRST_32
#undef FDSD_SUMS_8
#undef FDSD_SUMS_32
#undef FDSD_SUMS_64
#undef FDSD_PRODUCT
#undef FDSD_PAIR_PRODUCTS

#endif

}  // namespace fdsd::cuda
