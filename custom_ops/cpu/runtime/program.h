#pragma once
// A recorded sequence of op calls that runs as one. Knows params structs as bytes, and not what the ops compute.
#include <cstdint>
#include <vector>

#include "fdsd/program.h"

namespace fdsd {

class Program {
 public:
  // Copies what it is given. Returns the first contradiction as an error, and then leaves a program that does nothing.
  Error Build(const ProgramCreateParams& p);

  // Set the symbols and run the calls in order, up to the first that fails, or that computes a count of 0; the error
  // names it. Allocates nothing of its own; one run at a time.
  //   symbols          [num_symbols] as declared; 4-byte fields need values of 0..2^31 - 1
  //   nanoseconds      [num_calls] receives the time of each call, 0 of those that did not run, or nullptr
  Error Run(const int64_t* symbols, int32_t num_symbols, int64_t* nanoseconds);

 private:
  struct Call {
    const char* op;
    Error (*run)(const void* params);
    int64_t offset;        // of the params in memory_
    int32_t symbol;        // that it computes; -1 = none
    const int32_t* value;  // of that symbol
  };
  struct Field {
    int64_t offset;  // in memory_
    int32_t num_bytes;
  };

  Error AddCall(const ProgramCall& call);
  Error CheckPatch(const ProgramPatch& patch, const ProgramCreateParams& p) const;
  Error AddCount(const ProgramCount& count);
  Error TakeCount(const Call& call);
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
