#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "declarations.inc"

namespace fdsd {
namespace {

struct OpEntry {
  const char* name;
  int64_t num_bytes;
  Error (*run)(const void* params);
};

#define FDSD_OP(Name, snake) \
  {#snake, sizeof(Name##Params), [](const void* params) { return Name(*static_cast<const Name##Params*>(params)); }},
constexpr OpEntry kOps[] = {
#include "declarations.inc"
};
#undef FDSD_OP

const OpEntry* FindOp(const char* name) {
  for (const OpEntry& entry : kOps)
    if (std::strcmp(entry.name, name) == 0) return &entry;
  return nullptr;
}

// An error about one call, in memory of the calling thread that its next such error overwrites.
Error CallError(int64_t call, const char* op, const char* what) {
  thread_local char text[512];
  std::snprintf(text, sizeof(text), "call %lld (%s): %s", static_cast<long long>(call), op, what);
  return text;
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Error Program::AddCall(const ProgramCall& call) {
  const auto index = static_cast<int64_t>(calls_.size());
  const OpEntry* const entry = FindOp(call.op);
  if (entry == nullptr) return CallError(index, call.op, "expected an op of the library, got another name");
  if (entry->num_bytes != call.num_bytes)
    return CallError(index, call.op, "num_bytes: expected the size of the op's params, got another");
  const size_t begin = memory_.size();
  memory_.resize(begin + (static_cast<size_t>(call.num_bytes) + 7) / 8);
  std::memcpy(memory_.data() + begin, call.params, static_cast<size_t>(call.num_bytes));
  calls_.push_back({entry->name, entry->run, static_cast<int64_t>(begin * 8), -1, nullptr});
  return nullptr;
}

Error Program::CheckPatch(const ProgramPatch& patch, const ProgramCreateParams& p) const {
  if (patch.call < 0 || patch.call >= p.num_calls) return "patch.call: expected a call of the program, got another";
  const char* const op = calls_[patch.call].op;
  if (patch.num_bytes != 4 && patch.num_bytes != 8)
    return CallError(patch.call, op, "patch.num_bytes: expected 4 or 8, got another size");
  if (patch.offset < 0 || patch.offset > p.calls[patch.call].num_bytes - patch.num_bytes ||
      patch.offset % patch.num_bytes != 0)
    return CallError(patch.call, op, "patch.offset: expected an aligned field of the params, got another place");
  if (patch.symbol < 0 || patch.symbol >= static_cast<int64_t>(symbols_.size()))
    return CallError(patch.call, op, "patch.symbol: expected a symbol of the program, got another");
  return nullptr;
}

Error Program::AddCount(const ProgramCount& count) {
  if (count.call < 0 || count.call >= static_cast<int64_t>(calls_.size()))
    return "count.call: expected a call of the program, got another";
  Call& call = calls_[count.call];
  if (call.symbol >= 0) return CallError(count.call, call.op, "count.call: expected one count per call, got another");
  if (count.symbol < 0 || count.symbol >= static_cast<int64_t>(symbols_.size()))
    return CallError(count.call, call.op, "count.symbol: expected a symbol of the program, got another");
  call.symbol = count.symbol;
  call.value = count.value;
  return nullptr;
}

Error Program::Build(const ProgramCreateParams& p) {
  if (p.num_calls < 0 || p.num_patches < 0 || p.num_counts < 0 || p.num_symbols < 0)
    return "counts: expected >= 0, got a negative number";
  *this = Program();
  Program program;
  for (int32_t c = 0; c < p.num_calls; ++c)
    if (Error error = program.AddCall(p.calls[c])) return error;
  program.symbols_.assign(static_cast<size_t>(p.num_symbols), 0);
  program.cu_fields_.assign(static_cast<size_t>(p.num_symbols) + 1, 0);
  for (int32_t i = 0; i < p.num_counts; ++i)
    if (Error error = program.AddCount(p.counts[i])) return error;
  for (int32_t i = 0; i < p.num_patches; ++i) {
    if (Error error = program.CheckPatch(p.patches[i], p)) return error;
    ++program.cu_fields_[p.patches[i].symbol + 1];
  }
  for (int32_t s = 0; s < p.num_symbols; ++s) program.cu_fields_[s + 1] += program.cu_fields_[s];
  program.fields_.resize(static_cast<size_t>(p.num_patches));
  std::vector<int32_t> next(program.cu_fields_.begin(), program.cu_fields_.end() - 1);
  for (int32_t i = 0; i < p.num_patches; ++i) {
    const ProgramPatch& patch = p.patches[i];
    program.fields_[next[patch.symbol]++] = {program.calls_[patch.call].offset + patch.offset, patch.num_bytes};
  }
  for (int32_t s = 0; s < p.num_symbols; ++s)
    if (Error error = program.SetSymbol(s, 0)) return error;
  *this = std::move(program);
  return nullptr;
}

Error Program::SetSymbol(int32_t symbol, int64_t value) {
  const bool is_count = value >= 0 && value <= std::numeric_limits<int32_t>::max();
  const auto begin = fields_.begin() + cu_fields_[symbol];
  const auto end = fields_.begin() + cu_fields_[symbol + 1];
  // All are looked at before one is written: a refused value changes nothing.
  if (!is_count && std::any_of(begin, end, [](const Field& field) { return field.num_bytes == 4; }))
    return "symbols: expected 0..2^31 - 1 for a 4-byte field, got another value";
  for (auto field = begin; field != end; ++field) {
    // A narrower field takes the low bytes: the processor is little-endian.
    std::memcpy(memory() + field->offset, &value, static_cast<size_t>(field->num_bytes));
  }
  symbols_[symbol] = value;
  return nullptr;
}

Error Program::TakeCount(const Call& call) {
  if (*call.value < 0 || *call.value > symbols_[call.symbol])
    return "count: expected 0 to what the symbol was before, got another number";
  return SetSymbol(call.symbol, *call.value);
}

Error Program::Run(const int64_t* symbols, int32_t num_symbols, int64_t* nanoseconds) {
  if (num_symbols != static_cast<int64_t>(symbols_.size()))
    return "symbols: expected as many as the program has, got another number";
  for (int32_t s = 0; s < num_symbols; ++s) {
    if (symbols[s] == symbols_[s]) continue;
    if (Error error = SetSymbol(s, symbols[s])) return error;
  }
  if (nanoseconds != nullptr) std::fill_n(nanoseconds, calls_.size(), 0);
  int64_t begin = nanoseconds == nullptr ? 0 : Now();
  for (size_t c = 0; c < calls_.size(); ++c) {
    const Call& call = calls_[c];
    Error error = call.run(memory() + call.offset);
    if (error == nullptr && call.symbol >= 0) error = TakeCount(call);
    if (error != nullptr) return CallError(static_cast<int64_t>(c), call.op, error);
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
