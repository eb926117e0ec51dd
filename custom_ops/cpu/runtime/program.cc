#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "declarations.inc"

namespace fdsd {
namespace {

struct OpEntry : CallList::Op {
  Error (*run)(const void* params);
};

#define FDSD_OP(Name, snake) \
  {{#snake, sizeof(Name##Params)}, [](const void* params) { return Name(*static_cast<const Name##Params*>(params)); }},
constexpr OpEntry kOps[] = {
#include "declarations.inc"
};
#undef FDSD_OP

const CallList::Op* FindOp(const char* name) {
  for (const OpEntry& entry : kOps)
    if (std::strcmp(entry.name, name) == 0) return &entry;
  return nullptr;
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Error Program::AddCount(const ProgramCount& count) {
  if (count.call < 0 || count.call >= list_.size()) return "count.call: expected a call of the program, got another";
  Call& call = calls_[count.call];
  const char* const op = list_.op(count.call).name;
  if (call.symbol >= 0) return CallError(count.call, op, "count.call: expected one count per call, got another");
  if (count.symbol < 0 || count.symbol >= list_.num_symbols())
    return CallError(count.call, op, "count.symbol: expected a symbol of the program, got another");
  call.symbol = count.symbol;
  call.value = count.value;
  return nullptr;
}

Error Program::Build(const ProgramCreateParams& p) {
  *this = Program();
  Program program;
  if (Error error = program.list_.Build(p, FindOp)) return error;
  for (int64_t c = 0; c < program.list_.size(); ++c)
    program.calls_.push_back({static_cast<const OpEntry&>(program.list_.op(c)).run});
  for (int32_t i = 0; i < p.num_counts; ++i)
    if (Error error = program.AddCount(p.counts[i])) return error;
  *this = std::move(program);
  return nullptr;
}

Error Program::TakeCount(const Call& call) {
  if (*call.value < 0 || *call.value > list_.symbol(call.symbol))
    return "count: expected 0 to what the symbol was before, got another number";
  return list_.SetSymbol(call.symbol, *call.value);
}

Error Program::Run(const int64_t* symbols, int32_t num_symbols, int64_t* nanoseconds) {
  if (Error error = list_.SetSymbols(symbols, num_symbols)) return error;
  if (nanoseconds != nullptr) std::fill_n(nanoseconds, calls_.size(), 0);
  int64_t begin = nanoseconds == nullptr ? 0 : Now();
  for (size_t c = 0; c < calls_.size(); ++c) {
    const Call& call = calls_[c];
    const auto index = static_cast<int64_t>(c);
    Error error = call.run(list_.params(index));
    if (error == nullptr && call.symbol >= 0) error = TakeCount(call);
    if (error != nullptr) return CallError(index, list_.op(index).name, error);
    if (nanoseconds != nullptr) {
      const int64_t end = Now();
      nanoseconds[c] = end - begin;
      begin = end;
    }
    if (call.symbol >= 0 && *call.value == 0) break;
  }
  return nullptr;
}

}  // namespace fdsd
