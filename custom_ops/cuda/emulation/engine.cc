#include "emulation/engine.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulation/architecture.h"
#include "emulation/launches.h"
#include "emulation/memory.h"

// Put the registers that a function keeps on this stack, its pointer to *saved, and go on at another stack.
extern "C" void FdsdSwitchStack(void** saved, void* other);
asm(R"(
.text
.globl FdsdSwitchStack
.hidden FdsdSwitchStack
.type FdsdSwitchStack, @function
FdsdSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size FdsdSwitchStack, .-FdsdSwitchStack
)");

namespace fdsd::emulation {
namespace {

constexpr int kWarpSize = 32;
constexpr uint32_t kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;
constexpr uint32_t kMaxWarpPeriods = (1u << 20) - 1;

enum class State { kReady, kAtWarp, kAtBlock, kEnded };

struct Thread {
  void* stack_pointer = nullptr;
  State state = State::kReady;
  Index3 index{};
};

struct Warp {
  uint32_t num_arrived = 0;
  uint32_t num_meetings = 0;
  uint32_t period = 0;
  std::source_location where;
  uint64_t lanes[2][kWarpSize * kWordsPerLane];
};

// One stack per thread of a block, each after a page that may not be touched. Kept for the next launch.
class Stacks {
 public:
  char* Top(uint32_t i) {
    while (tops_.size() <= i) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) return nullptr;
      tops_.push_back(static_cast<char*>(memory) + kStackBytes);
    }
    return tops_[i];
  }

 private:
  std::vector<char*> tops_;
};

// The launch that runs.
struct Engine {
  Stacks stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  void* scheduler = nullptr;  // its stack pointer, while a thread runs
  const std::function<void()>* body = nullptr;
  uint32_t num_arrived = 0;  // at the block's barrier
  std::source_location barrier;
  std::string error;
  int64_t num_launches = 0;
  std::mutex mutex;
};
Engine engine;

Warp& OwnWarp() { return engine.warps[place_now.linear / kWarpSize]; }

void StartPeriod() {
  ++place_now.period;
  for (Warp& warp : engine.warps) warp.period = 0;
  place_now.warp_period = 0;
}

// The first function of every thread's stack; it has no caller.
void RunThread() {
  (*engine.body)();
  engine.threads[place_now.linear].state = State::kEnded;
  LeaveThread();
  __builtin_unreachable();
}

void* NewStack(char* top) {
  // As the switch leaves it: registers, then the return address, then a word that aligns the stack as after a call.
  void** words = reinterpret_cast<void**>(top) - kSavedRegisters - 2;
  std::memset(words, 0, (kSavedRegisters + 2) * sizeof(void*));
  words[kSavedRegisters] = reinterpret_cast<void*>(&RunThread);
  return words;
}

const char* NameOf(const std::source_location& where) {
  static thread_local char text[256];
  std::snprintf(text, sizeof(text), "%s:%u", where.file_name(), static_cast<unsigned>(where.line()));
  return text;
}

// What waits for what, when nothing can go on.
void FailWithDeadlock() {
  uint32_t counts[4] = {};
  for (const Thread& thread : engine.threads) ++counts[static_cast<int>(thread.state)];
  char text[512];
  std::snprintf(text, sizeof(text),
                "deadlock: %u threads wait for their block at %s, %u for their warp, %u have ended or never come",
                counts[static_cast<int>(State::kAtBlock)],
                engine.num_arrived > 0 ? NameOf(engine.barrier) : "no barrier",
                counts[static_cast<int>(State::kAtWarp)], counts[static_cast<int>(State::kEnded)]);
  engine.error = text;
}

void RunReady(uint32_t linear) {
  Thread& thread = engine.threads[linear];
  place_now.linear = linear;
  place_now.thread_idx = thread.index;
  place_now.warp_period = engine.warps[linear / kWarpSize].period;
  FdsdSwitchStack(&engine.scheduler, thread.stack_pointer);
}

// Runs the threads of a block to their end, or until one fails.
void RunThreads() {
  for (bool moves = true; moves && engine.error.empty();) {
    moves = false;
    for (uint32_t i = 0; i < engine.threads.size() && engine.error.empty(); ++i) {
      if (engine.threads[i].state != State::kReady) continue;
      moves = true;
      RunReady(i);
    }
  }
  if (!engine.error.empty()) return;
  for (const Thread& thread : engine.threads) {
    if (thread.state != State::kEnded) return FailWithDeadlock();
  }
}

bool PrepareBlock(Size3 block, int32_t dynamic_bytes) {
  const uint32_t count = block.x * block.y * block.z;
  engine.threads.assign(count, Thread{});
  engine.warps.assign(count / kWarpSize, Warp{});
  for (uint32_t i = 0; i < count; ++i) {
    char* top = engine.stacks.Top(i);
    if (top == nullptr) return false;
    engine.threads[i].stack_pointer = NewStack(top);
    engine.threads[i].index = Index3{i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
  BeginSharedMemory(static_cast<size_t>(dynamic_bytes));
  StartPeriod();
  place_now.block_begin = place_now.period;
  engine.num_arrived = 0;
  return true;
}

}  // namespace

ThreadPlace place_now{};

void LeaveThread() { FdsdSwitchStack(&engine.threads[place_now.linear].stack_pointer, engine.scheduler); }

void Fail(const char* format, ...) {
  char text[512];
  const int used = std::snprintf(text, sizeof(text), "block (%u, %u, %u) thread %u ", place_now.block_idx.x,
                                 place_now.block_idx.y, place_now.block_idx.z, place_now.linear);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + used, sizeof(text) - static_cast<size_t>(used), format, arguments);
  va_end(arguments);
  engine.error = text;
  LeaveThread();
  __builtin_unreachable();
}

void WaitForBlock(std::source_location where) {
  if (engine.num_arrived > 0 && where.line() != engine.barrier.line()) {
    Fail("waits for its block at line %u, another thread at %s", static_cast<unsigned>(where.line()),
         NameOf(engine.barrier));
  }
  engine.barrier = where;
  if (++engine.num_arrived < engine.threads.size()) {
    engine.threads[place_now.linear].state = State::kAtBlock;
    return LeaveThread();
  }
  engine.num_arrived = 0;
  StartPeriod();
  for (Thread& thread : engine.threads) thread.state = State::kReady;
}

const uint64_t* MeetWarp(unsigned mask, const void* bytes, int32_t num_bytes, bool orders_memory,
                         std::source_location where) {
  Warp& warp = OwnWarp();
  if (mask != 0xffffffffu) Fail("expected all lanes in the mask of a warp function, got %08x", mask);
  if (warp.num_arrived > 0 && where.line() != warp.where.line()) {
    Fail("meets its warp at line %u, another lane at %s", static_cast<unsigned>(where.line()), NameOf(warp.where));
  }
  uint64_t* lanes = warp.lanes[warp.num_meetings % 2];
  if (num_bytes > 0) {
    std::memcpy(lanes + place_now.linear % kWarpSize * kWordsPerLane, bytes, static_cast<size_t>(num_bytes));
  }
  warp.where = where;
  if (++warp.num_arrived < kWarpSize) {
    engine.threads[place_now.linear].state = State::kAtWarp;
    LeaveThread();
    return lanes;
  }
  warp.num_arrived = 0;
  ++warp.num_meetings;
  if (orders_memory && ++warp.period > kMaxWarpPeriods) Fail("more __syncwarp than the emulation counts");
  place_now.warp_period = warp.period;
  const uint32_t first = place_now.linear / kWarpSize * kWarpSize;
  for (uint32_t i = first; i < first + kWarpSize; ++i) engine.threads[i].state = State::kReady;
  return lanes;
}

Error LaunchRefusal(const char* name, Size3 grid, Size3 block, int32_t dynamic_bytes) {
  static thread_local std::string text;
  const uint64_t count = uint64_t{block.x} * block.y * block.z;
  text.clear();
  if (count == 0 || count > kMaxThreads) text = "expected 1..1024 threads per block";
  if (count % kWarpSize != 0) text = "expected blocks of whole warps";
  if (grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) text = "expected a grid within CUDA's limits";
  const Chip& chip = ChipNow();
  if (dynamic_bytes < 0 || dynamic_bytes > chip.block_bytes)
    text = "expected at most " + std::to_string(chip.block_bytes >> 10) + " KB of shared memory on sm_" +
           std::to_string(Architecture()) + ", got " + std::to_string(dynamic_bytes) + " bytes";
  if (text.empty()) return nullptr;
  text = PlainName(name) + ": " + text;
  return text.c_str();
}

Error RunKernel(const char* name, Size3 grid, Size3 block, int32_t dynamic_bytes, const std::function<void()>& body) {
  static thread_local std::string text;
  if (NoteLaunch(name, block, dynamic_bytes)) return nullptr;
  const std::lock_guard lock(engine.mutex);
  ++engine.num_launches;
  engine.error.clear();
  engine.body = &body;
  place_now.block_dim = block;
  place_now.grid_dim = grid;
  place_now.launch_begin = place_now.period + 1;
  for (unsigned z = 0; z < grid.z && engine.error.empty(); ++z) {
    for (unsigned y = 0; y < grid.y && engine.error.empty(); ++y) {
      for (unsigned x = 0; x < grid.x && engine.error.empty(); ++x) {
        place_now.block_idx = Index3{x, y, z};
        if (PrepareBlock(block, dynamic_bytes)) {
          RunThreads();
        } else {
          engine.error = "no memory for the stacks of a block's threads";
        }
      }
    }
  }
  if (engine.error.empty()) return nullptr;
  text = PlainName(name) + ": " + engine.error;
  return text.c_str();
}

int64_t NumLaunches() { return engine.num_launches; }

}  // namespace fdsd::emulation
