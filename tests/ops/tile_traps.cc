// Executes AMX tile instructions in the handler of SIGILL, so that code for a chip with tiles runs, slowly, on one
// without. Written from Intel's Software Developer's Manual, and on purpose nothing of the kernel library: faults are
// the chip's, and end the process. For tests; `install_tile_traps` is for the whole process.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTiles = 8;
constexpr int kMaxRows = 16;
constexpr int kMaxBytes = 64;

struct Tile {
  int rows, row_bytes;
  uint8_t data[kMaxRows][kMaxBytes];
};
thread_local Tile tiles[kTiles];
thread_local bool is_configured = false;

[[noreturn]] void Fault(const char* text) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::strlen(text));
  _exit(99);
}
void Require(bool is_legal, const char* text) {
  if (!is_legal) Fault(text);
}

void Configure(const uint8_t* config) {
  Require(config[0] == 1 && config[1] == 0, "LDTILECFG: palette or start row\n");
  for (int i = 2; i < 64; ++i) {
    const bool is_reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    Require(!is_reserved || config[i] == 0, "LDTILECFG: reserved byte\n");
  }
  for (int t = 0; t < kTiles; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * t, sizeof(row_bytes));
    const int rows = config[48 + t];
    Require(rows <= kMaxRows && row_bytes <= kMaxBytes && (rows == 0) == (row_bytes == 0), "LDTILECFG: shape\n");
    tiles[t] = {rows, row_bytes, {}};
  }
  is_configured = true;
}

Tile& At(int index) {
  Require(is_configured && index < kTiles && tiles[index].rows > 0, "a tile that is not configured\n");
  return tiles[index];
}

// Round to nearest even, no denormals in or out.
float WithoutDenormals(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float FusedMultiplyAdd(float a, float b, float c) {
  return WithoutDenormals(std::fma(WithoutDenormals(a), WithoutDenormals(b), WithoutDenormals(c)));
}
float Sum(float a, float b) { return WithoutDenormals(WithoutDenormals(a) + WithoutDenormals(b)); }

float Bf16At(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void MultiplyBf16(const uint8_t* a, const Tile& b, int n, uint8_t* element) {
  float even = 0.0f, odd = 0.0f, c;
  for (int k = 0; k < b.rows; ++k) {
    even = FusedMultiplyAdd(Bf16At(a + 4 * k), Bf16At(b.data[k] + 4 * n), even);
    odd = FusedMultiplyAdd(Bf16At(a + 4 * k + 2), Bf16At(b.data[k] + 4 * n + 2), odd);
  }
  std::memcpy(&c, element, sizeof(c));
  c = Sum(c, Sum(even, odd));
  std::memcpy(element, &c, sizeof(c));
}

int32_t ByteAt(const uint8_t* p, bool is_signed) { return is_signed ? static_cast<int8_t>(*p) : *p; }

void MultiplyBytes(const uint8_t* a, bool is_a_signed, const Tile& b, bool is_b_signed, int n, uint8_t* element) {
  uint32_t c;
  std::memcpy(&c, element, sizeof(c));
  for (int k = 0; k < b.rows; ++k) {
    for (int i = 0; i < 4; ++i) {
      c += static_cast<uint32_t>(ByteAt(a + 4 * k + i, is_a_signed) * ByteAt(b.data[k] + 4 * n + i, is_b_signed));
    }
  }
  std::memcpy(element, &c, sizeof(c));
}

enum Prefix : int { kNone = 0, k66 = 1, kF3 = 2, kF2 = 3 };

void Multiply(int opcode, int prefix, int c_index, int a_index, int b_index) {
  Require(c_index != a_index && c_index != b_index && a_index != b_index, "a product with a tile twice\n");
  Tile& c = At(c_index);
  const Tile &a = At(a_index), &b = At(b_index);
  Require(c.row_bytes == b.row_bytes && c.rows == a.rows && a.row_bytes == 4 * b.rows, "a product of other shapes\n");
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      uint8_t* const element = c.data[m] + 4 * n;
      if (opcode == 0x5c) {
        MultiplyBf16(a.data[m], b, n, element);
      } else {
        MultiplyBytes(a.data[m], prefix == kF2 || prefix == kF3, b, prefix == kF2 || prefix == k66, n, element);
      }
    }
  }
}

// Registers by their numbers in instructions.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// The memory operand of an instruction whose ModRM byte is at `p`.
struct Memory {
  uint8_t* base;       // with the displacement
  int64_t index;       // scaled
  const uint8_t* end;  // of the operand's bytes
};
Memory MemoryOperand(const uint8_t* p, int vex, const greg_t* registers) {
  const int high_index = (vex & 0x40) != 0 ? 0 : 8, high_base = (vex & 0x20) != 0 ? 0 : 8;
  const int mod = *p >> 6;
  int base = *p++ & 7;
  int64_t address = 0, index = 0;
  bool has_base = true;
  if (base == 4) {
    const int sib = *p++;
    base = sib & 7;
    const int number = (sib >> 3 & 7) + high_index;
    if (number != 4) index = registers[kRegisters[number]] << (sib >> 6);
    has_base = !(base == 5 && mod == 0);
    Require(has_base, "an address without a base\n");
  } else {
    Require(!(base == 5 && mod == 0), "an address relative to the instruction\n");
  }
  address = registers[kRegisters[base + high_base]];
  if (mod == 1) address += static_cast<int8_t>(*p++);
  if (mod == 2) {
    int32_t displacement;
    std::memcpy(&displacement, p, sizeof(displacement));
    address += displacement;
    p += sizeof(displacement);
  }
  return {reinterpret_cast<uint8_t*>(address), index, p};
}

// Returns the address of the next instruction.
const uint8_t* Execute(const uint8_t* p, const greg_t* registers) {
  Require(p[0] == 0xc4 && (p[1] & 0x1f) == 2 && (p[2] & 0x84) == 0, "an illegal instruction that is none of tiles\n");
  const int prefix = p[2] & 3, opcode = p[3], modrm = p[4];
  const int reg = modrm >> 3 & 7, rm = modrm & 7, third = ~(p[2] >> 3) & 15;
  const bool is_memory = modrm >> 6 != 3;
  if (opcode == 0x49 && prefix == kNone && is_memory && reg == 0) {
    const Memory at = MemoryOperand(p + 4, p[1], registers);
    Configure(at.base + at.index);
    return at.end;
  }
  if (opcode == 0x49 && prefix == kNone && modrm == 0xc0) {
    is_configured = false;
    return p + 5;
  }
  if (opcode == 0x49 && prefix == kF2 && !is_memory && rm == 0) {
    std::memset(At(reg).data, 0, sizeof(Tile::data));
    return p + 5;
  }
  if (opcode == 0x4b && is_memory && rm == 4 && (prefix == kF2 || prefix == kF3)) {
    Tile& tile = At(reg);
    const Memory at = MemoryOperand(p + 4, p[1], registers);
    if (prefix == kF2) std::memset(tile.data, 0, sizeof(tile.data));
    for (int r = 0; r < tile.rows; ++r) {
      uint8_t* const row = at.base + r * at.index;
      if (prefix == kF2) {
        std::memcpy(tile.data[r], row, static_cast<size_t>(tile.row_bytes));
      } else {
        std::memcpy(row, tile.data[r], static_cast<size_t>(tile.row_bytes));
      }
    }
    return at.end;
  }
  if (!is_memory && (opcode == 0x5e || (opcode == 0x5c && prefix == kF3))) {
    Multiply(opcode, prefix, reg, rm, third);
    return p + 5;
  }
  Fault("an illegal instruction that is none of tiles\n");
}

void OnIllegalInstruction(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  registers[REG_RIP] = reinterpret_cast<greg_t>(Execute(at, registers));
}

}  // namespace

extern "C" int install_tile_traps() {
  struct sigaction action = {};
  action.sa_sigaction = OnIllegalInstruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr);
}
