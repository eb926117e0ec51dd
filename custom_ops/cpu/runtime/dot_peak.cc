#include "dot_peak.h"

#include <algorithm>
#include <chrono>

#include "amx/product.h"
#include "fdsd/runtime.h"
#include "linear_layout.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

using Clock = std::chrono::steady_clock;

// Accumulators enough to cover the instructions' latency; the loop is one piece of assembly, so that the compiler
// cannot place anything between the instructions.
constexpr int64_t kAccumulators = 10;
constexpr int64_t kRounds = 400'000;
// Parts of a pass: a thread that starts late leaves its share to the others.
constexpr int64_t kParts = 16;

#define FDSD_EACH(op) op("1") op("2") op("3") op("4") op("5") op("6") op("7") op("8") op("9") op("10")
#define FDSD_CLEAR(i) "vpxor %%xmm" i ", %%xmm" i ", %%xmm" i "\n"
#define FDSD_LOOP(op)                \
  int64_t rounds = kRounds / kParts; \
  asm volatile("vpxor %%xmm0, %%xmm0, %%xmm0\n" FDSD_EACH(FDSD_CLEAR) "1:\n" FDSD_EACH(op) "dec %0\n"           \
               "jnz 1b\n"                                                                                       \
               "vzeroupper\n"                                                                                   \
               : "+r"(rounds)                                                                                   \
               :                                                                                                \
               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "cc")

#define FDSD_DPBUSD(i) "vpdpbusd %%zmm0, %%zmm0, %%zmm" i "\n"
#define FDSD_DPBF16(i) "vdpbf16ps %%zmm0, %%zmm0, %%zmm" i "\n"
#define FDSD_FMA512(i) "vfmadd231ps %%zmm0, %%zmm0, %%zmm" i "\n"
#define FDSD_FMA256(i) "vfmadd231ps %%ymm0, %%ymm0, %%ymm" i "\n"
#define FDSD_MADD(i) \
  "vpmaddubsw %%ymm0, %%ymm0, %%ymm11\nvpmaddwd %%ymm0, %%ymm11, %%ymm11\nvpaddd %%ymm11, %%ymm" i ", %%ymm" i "\n"

void Int8Avx512() { FDSD_LOOP(FDSD_DPBUSD); }
void Bf16Avx512() { FDSD_LOOP(FDSD_DPBF16); }
void FloatAvx512() { FDSD_LOOP(FDSD_FMA512); }
void Int8Avx2() { FDSD_LOOP(FDSD_MADD); }
void FloatAvx2() { FDSD_LOOP(FDSD_FMA256); }

// A product of tiles takes sixteen times as long as a vector instruction.
constexpr int64_t kTileRounds = kRounds / kParts / 16;
constexpr int64_t kTileProducts = 4;
void Int8Tiles() { avx512::amx::RepeatTileProducts(true, kTileRounds); }
void Bf16Tiles() { avx512::amx::RepeatTileProducts(false, kTileRounds); }

struct Loop {
  void (*run)();
  int64_t operations;  // of one run
};

// operations: of one instruction, for AVX2 integers of the three that make a dot product.
Loop VectorLoop(void (*run)(), int64_t operations) { return {run, kRounds / kParts * kAccumulators * operations}; }
Loop TileLoop(void (*run)(), bool is_int) {
  return {run, kTileRounds * kTileProducts * avx512::amx::TileOperations(is_int)};
}

Loop LoopOf(LinearFormat format) {
  const bool is_int = IsQuantized(format);
  if (CurrentIsa() == Isa::kAmx && format != LinearFormat::kFloat32) {
    return is_int ? TileLoop(Int8Tiles, true) : TileLoop(Bf16Tiles, false);
  }
  if (CurrentIsa() == Isa::kAvx2) return is_int ? VectorLoop(Int8Avx2, 64) : VectorLoop(FloatAvx2, 16);
  if (is_int) return VectorLoop(Int8Avx512, 128);
  return format == LinearFormat::kBFloat16 ? VectorLoop(Bf16Avx512, 64) : VectorLoop(FloatAvx512, 32);
}

}  // namespace

double DotPeak(LinearFormat format, int32_t num_passes) {
  if (CurrentIsa() == Isa::kScalar || TilesInUse() == Tiles::kTwin) return 0.0;
  const Loop loop = LoopOf(format);
  double best = 0.0;
  for (int32_t pass = 0; pass < num_passes; ++pass) {
    const auto start = Clock::now();
    ParallelFor(kParts, [&](int64_t) { loop.run(); });
    const double elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(kParts * loop.operations) / elapsed_s);
  }
  return best;
}

}  // namespace fdsd
