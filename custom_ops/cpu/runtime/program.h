#pragma once
// A recorded sequence of op calls that runs as one. Knows params structs as bytes, and not what the ops compute.
#include <cstdint>
#include <vector>

#include "call_list.h"
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
    Error (*run)(const void* params);
    int32_t symbol = -1;             // that it computes; -1 = none
    const int32_t* value = nullptr;  // of that symbol
  };

  Error AddCount(const ProgramCount& count);
  Error TakeCount(const Call& call);

  CallList list_;
  std::vector<Call> calls_;
};

}  // namespace fdsd
