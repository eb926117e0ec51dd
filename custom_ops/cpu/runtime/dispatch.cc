// Chooses the instruction-set level of every op at run time.
#include <atomic>

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
  }
  return false;
}

std::atomic<Isa>& Level() {
  static std::atomic<Isa> level{BestIsa()};
  return level;
}

}  // namespace

Isa BestIsa() { return Supports(Isa::kAvx512) ? Isa::kAvx512 : Supports(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar; }

Isa CurrentIsa() { return Level().load(std::memory_order_relaxed); }

Error SetIsa(Isa isa) {
  if (!Supports(isa)) return "isa: this processor lacks the requested instruction-set level";
  Level().store(isa, std::memory_order_relaxed);
  return nullptr;
}

#define FDSD_OP(Name, snake)          \
  namespace scalar {                  \
  Error Name(const Name##Params& p);  \
  }                                   \
  namespace avx2 {                    \
  Error Name(const Name##Params& p);  \
  }                                   \
  namespace avx512 {                  \
  Error Name(const Name##Params& p);  \
  }                                   \
  Error Name(const Name##Params& p) { \
    switch (CurrentIsa()) {           \
      case Isa::kAvx512:              \
        return avx512::Name(p);       \
      case Isa::kAvx2:                \
        return avx2::Name(p);         \
      case Isa::kScalar:              \
        break;                        \
    }                                 \
    return scalar::Name(p);           \
  }
#include "declarations.inc"
#undef FDSD_OP

}  // namespace fdsd
