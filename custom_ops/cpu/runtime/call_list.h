#pragma once
// The calls of a program: their params structs as bytes, and the fields of them that differ from run to run. Does not
// know what the ops compute, nor where they run.
#include <cstdint>
#include <vector>

#include "fdsd/program.h"

namespace fdsd {

// An error about one call, in memory of the calling thread that its next such error overwrites.
Error CallError(int64_t call, const char* op, const char* what);

class CallList {
 public:
  // How an op is known where the calls run: the name, which outlives the list, and the size of its params.
  struct Op {
    const char* name;
    int64_t num_bytes;
  };

  // Copies what it is given, counts aside. Returns the first contradiction as an error, and then leaves an empty list.
  //   find_op          returns nullptr where there is no such op
  Error Build(const ProgramCreateParams& p, const Op* (*find_op)(const char* name));

  int64_t size() const { return static_cast<int64_t>(calls_.size()); }
  int64_t num_symbols() const { return static_cast<int64_t>(symbols_.size()); }
  const Op& op(int64_t call) const { return *calls_[call].op; }
  const void* params(int64_t call) const { return reinterpret_cast<const char*>(memory_.data()) + calls_[call].offset; }
  int64_t symbol(int32_t symbol) const { return symbols_[symbol]; }

  // Write symbols to their fields; 4-byte fields need values of 0..2^31 - 1.
  Error SetSymbols(const int64_t* symbols, int32_t num_symbols);
  Error SetSymbol(int32_t symbol, int64_t value);

 private:
  struct Call {
    const Op* op;
    int64_t offset;  // of the params in memory_
  };
  struct Field {
    int64_t offset;  // in memory_
    int32_t num_bytes;
  };

  Error AddCall(const ProgramCall& call, const Op* op);
  Error CheckPatch(const ProgramPatch& patch, const ProgramCreateParams& p) const;

  std::vector<Call> calls_;
  std::vector<uint64_t> memory_;    // params structs, each 8-byte aligned
  std::vector<Field> fields_;       // by symbol
  std::vector<int32_t> cu_fields_;  // [num_symbols + 1], symbol s owns fields [cu[s], cu[s + 1])
  std::vector<int64_t> symbols_;    // values of the last run
};

}  // namespace fdsd
