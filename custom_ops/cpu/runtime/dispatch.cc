// Chooses the instruction-set level of every op at run time. Level amx has the ops of avx512, which use tiles where
// TilesInUse() says so.
#include <atomic>

#include "amx_support.h"
#include "declarations.inc"

namespace fdsd {
namespace {

bool Supports(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return AmxRefusal() == nullptr;
  }
  return false;
}

// Whether a processor computes in the types of a call.
template <typename Params>
Error CheckTypes(const Params& p) {
  bool has_float16 = false;
  if constexpr (requires { p.dtype; }) has_float16 |= p.dtype == DType::kFloat16;
  if constexpr (requires { p.x_dtype; }) has_float16 |= p.x_dtype == DType::kFloat16;
  if constexpr (requires { p.y_dtype; }) has_float16 |= p.y_dtype == DType::kFloat16;
  if constexpr (requires { p.cache.dtype; }) has_float16 |= p.cache.dtype == DType::kFloat16;
  return has_float16 ? "dtype: expected float32 or bfloat16 on a processor, got float16, which only GPUs compute in"
                     : nullptr;
}

std::atomic<Tiles> assumed_tiles{Tiles::kNone};

std::atomic<Isa>& Level() {
  static std::atomic<Isa> level{BestIsa()};
  return level;
}

}  // namespace

Error AmxRefusal() {
  if (!Supports(Isa::kAvx512)) return "this processor has no AVX-512 with VNNI and bf16";
  return TileRefusal();
}

Isa BestIsa() {
  for (const Isa isa : {Isa::kAmx, Isa::kAvx512, Isa::kAvx2}) {
    if (Supports(isa)) return isa;
  }
  return Isa::kScalar;
}

Isa CurrentIsa() { return Level().load(std::memory_order_relaxed); }

Error SetIsa(Isa isa) {
  const bool is_assumed = isa == Isa::kAmx && assumed_tiles.load(std::memory_order_relaxed) != Tiles::kNone;
  if (!Supports(isa) && !is_assumed) return "isa: this processor lacks the requested instruction-set level";
  Level().store(isa, std::memory_order_relaxed);
  return nullptr;
}

Tiles TilesInUse() {
  if (CurrentIsa() != Isa::kAmx) return Tiles::kNone;
  const Tiles assumed = assumed_tiles.load(std::memory_order_relaxed);
  return assumed != Tiles::kNone ? assumed : Tiles::kChip;
}

Error AssumeTiles(Tiles tiles) {
  if (CurrentIsa() == Isa::kAmx) return "tiles: expected another level than amx in use meanwhile, got amx";
  if (!Supports(Isa::kAvx512)) return "tiles: expected a processor with AVX-512, got another";
  assumed_tiles.store(tiles, std::memory_order_relaxed);
  return nullptr;
}

Error ChipRefusal() { return assumed_tiles.load(std::memory_order_relaxed) == Tiles::kChip ? nullptr : AmxRefusal(); }

#define FDSD_OP(Name, snake)                             \
  namespace scalar {                                     \
  Error Name(const Name##Params& p);                     \
  }                                                      \
  namespace avx2 {                                       \
  Error Name(const Name##Params& p);                     \
  }                                                      \
  namespace avx512 {                                     \
  Error Name(const Name##Params& p);                     \
  }                                                      \
  Error Name(const Name##Params& p) {                    \
    if (const Error error = CheckTypes(p)) return error; \
    switch (CurrentIsa()) {                              \
      case Isa::kAmx:                                    \
      case Isa::kAvx512:                                 \
        return avx512::Name(p);                          \
      case Isa::kAvx2:                                   \
        return avx2::Name(p);                            \
      case Isa::kScalar:                                 \
        break;                                           \
    }                                                    \
    return scalar::Name(p);                              \
  }
#include "declarations.inc"
#undef FDSD_OP

}  // namespace fdsd
