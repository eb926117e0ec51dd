#include "amx_support.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace fdsd {
namespace {

// CPUID leaf 7, EDX.
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
// Of XCR0: the system saves the tiles' configuration and their data.
constexpr unsigned kTileConfigState = 1u << 17, kTileDataState = 1u << 18;
// arch_prctl: tile data is large, so Linux (5.16 and newer) wants to be asked.
constexpr int kRequestPermission = 0x1023;
constexpr int kTileDataFeature = 18;

Error Ask() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmx = kAmxBf16 | kAmxTile | kAmxInt8;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kAmx) != kAmx) {
    return "this processor has no AMX with bf16 and int8";
  }
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) {
    return "the system does not save the processor's extended registers";
  }
  unsigned low = 0, high = 0;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & (kTileConfigState | kTileDataState)) != (kTileConfigState | kTileDataState)) {
    return "the system does not save AMX tiles (Linux does from 5.16 on)";
  }
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) == 0) return nullptr;
  switch (errno) {
    case EINVAL:
    case ENOSYS:
      return "the system knows no permission for AMX tiles (Linux does from 5.16 on)";
    case EPERM:
      return "the system refuses permission for AMX tiles (a sandbox or container forbids arch_prctl)";
    case ENOSPC:
      return "the system refuses permission for AMX tiles: a thread's alternate signal stack is too small for them";
    default:
      return "the system refuses permission for AMX tiles";
  }
}

}  // namespace

Error TileRefusal() {
  static const Error refusal = Ask();
  return refusal;
}

}  // namespace fdsd
