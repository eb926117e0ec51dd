#pragma once
// A recorded sequence of op calls that runs as one. Knows params structs as bytes, and not what the ops compute.
#include <cstdint>
#include <vector>

#include "fdsd/program.h"

namespace fdsd {

class Program {
 public:
  // Copies what it is given. Returns the first contradiction as an error, and then leaves a program that does nothing.
  Error Build(const ProgramCall* calls, int32_t num_calls, const ProgramPatch* patches, int32_t num_patches,
              int32_t num_symbols);

  // Set the symbols and run the calls in order, up to the first that fails; the error names it. Allocates nothing of
  // its own; one run at a time.
  //   symbols          [num_symbols] as declared; 4-byte fields need values of 0..2^31 - 1
  //   nanoseconds      [num_calls] receives the time of each call, or nullptr
  Error Run(const int64_t* symbols, int32_t num_symbols, int64_t* nanoseconds);

 private:
  struct Call {
    const char* op;
    Error (*run)(const void* params);
    int64_t offset;  // of the params in memory_
  };
  struct Field {
    int64_t offset;  // in memory_
    int32_t num_bytes;
  };

  Error AddCall(const ProgramCall& call);
  Error CheckPatch(const ProgramPatch& patch, const ProgramCall* calls, int32_t num_calls) const;
  Error SetSymbol(int32_t symbol, int64_t value);

  const char* memory() const { return reinterpret_cast<const char*>(memory_.data()); }
  char* memory() { return reinterpret_cast<char*>(memory_.data()); }

  std::vector<Call> calls_;
  std::vector<uint64_t> memory_;    // params structs, each 8-byte aligned
  std::vector<Field> fields_;       // by symbol
  std::vector<int32_t> cu_fields_;  // [num_symbols + 1], symbol s owns fields [cu[s], cu[s + 1])
  std::vector<int64_t> symbols_;    // values of the last run
};

}  // namespace fdsd
