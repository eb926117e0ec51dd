#pragma once
// A recorded sequence of op calls, as it is handed over and run; see cpu/runtime/program.h.
#include "fdsd/status.h"

namespace fdsd {

class Program;

// One call: the op's name and its params struct, complete but for the fields that patches fill.
struct ProgramCall {
  const char* op;
  const void* params;  // [num_bytes]
  int32_t num_bytes;
};

// A field of a call's params struct that differs from run to run: before a run it gets the value of a symbol.
struct ProgramPatch {
  int32_t call;
  int32_t offset;     // in the params struct, in bytes
  int32_t num_bytes;  // 4: a count, 8: an address or a count
  int32_t symbol;
};

// A symbol that a call computes: when the call has run, the symbol has this value. It must not have become larger;
// where it is 0 the run is over, as what follows works on that many rows.
struct ProgramCount {
  int32_t call;
  int32_t symbol;
  const int32_t* value;  // [1]
};

struct ProgramCreateParams {
  int32_t num_calls;
  int32_t num_patches;
  int32_t num_counts;
  int32_t num_symbols;
  const ProgramCall* calls;     // [num_calls]
  const ProgramPatch* patches;  // [num_patches]
  const ProgramCount* counts;   // [num_counts], at most one per call
  Program** program;            // [1], to be destroyed with fdsd_program_destroy
};

struct ProgramRunParams {
  Program* program;
  int32_t num_symbols;
  const int64_t* symbols;  // [num_symbols]
  int64_t* nanoseconds;    // [num_calls], may be nullptr
};

}  // namespace fdsd
