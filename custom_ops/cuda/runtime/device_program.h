#pragma once
// A recorded sequence of op calls on a stream: launched one after the other, or captured as a graph for sizes that come
// again. As the CPU's program (cpu/runtime/program.h), but nothing is waited for, so a count that a call computes is
// not looked at: sizes stay what they were.
#include <cstdint>
#include <vector>

#include "call_list.h"
#include "device.h"

namespace fdsd::cuda {

class DeviceProgram {
 public:
  // Copies what it is given. Returns the first contradiction as an error, and then leaves a program that does nothing.
  Error Build(const ProgramCreateParams& p);

  // Set the symbols; what follows is for them.
  //   symbols          [num_symbols] as declared; 4-byte fields need values of 0..2^31 - 1
  Error SetSymbols(const int64_t* symbols, int32_t num_symbols) { return list_.SetSymbols(symbols, num_symbols); }

  // Memory between two kernels that the call which wants most of it wants; they have it one after the other.
  int64_t WorkspaceBytes() const;

  // Put all calls on a stream, up to one that is refused; the error names it.
  //   workspace        [WorkspaceBytes()], aligned to 128; one run at a time has it
  Error Launch(void* workspace, Stream stream) const;

  // As Launch, then wait.
  //   nanoseconds      [num_calls] receives the time of each call
  Error TimedLaunch(void* workspace, Stream stream, int64_t* nanoseconds) const;

  // As Launch, but make a graph of it instead: to be launched as often as wanted, and destroyed.
  Error Capture(void* workspace, Stream stream, cudaGraphExec_t* graph) const;

 private:
  struct Op;
  static const CallList::Op* FindOp(const char* name);

  Error LaunchCall(int64_t call, void* workspace, Stream stream) const;

  CallList list_;
};

}  // namespace fdsd::cuda
