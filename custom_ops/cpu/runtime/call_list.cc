#include "call_list.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

namespace fdsd {

Error CallError(int64_t call, const char* op, const char* what) {
  thread_local char text[1024];
  std::snprintf(text, sizeof(text), "call %lld (%s): %s", static_cast<long long>(call), op, what);
  return text;
}

Error CallList::AddCall(const ProgramCall& call, const Op* op) {
  const int64_t index = size();
  if (op == nullptr) return CallError(index, call.op, "expected an op of the library, got another name");
  if (op->num_bytes != call.num_bytes)
    return CallError(index, call.op, "num_bytes: expected the size of the op's params, got another");
  const size_t begin = memory_.size();
  memory_.resize(begin + (static_cast<size_t>(call.num_bytes) + 7) / 8);
  std::memcpy(memory_.data() + begin, call.params, static_cast<size_t>(call.num_bytes));
  calls_.push_back({op, static_cast<int64_t>(begin * 8)});
  return nullptr;
}

Error CallList::CheckPatch(const ProgramPatch& patch, const ProgramCreateParams& p) const {
  if (patch.call < 0 || patch.call >= p.num_calls) return "patch.call: expected a call of the program, got another";
  const char* const name = op(patch.call).name;
  if (patch.num_bytes != 4 && patch.num_bytes != 8)
    return CallError(patch.call, name, "patch.num_bytes: expected 4 or 8, got another size");
  if (patch.offset < 0 || patch.offset > p.calls[patch.call].num_bytes - patch.num_bytes ||
      patch.offset % patch.num_bytes != 0)
    return CallError(patch.call, name, "patch.offset: expected an aligned field of the params, got another place");
  if (patch.symbol < 0 || patch.symbol >= num_symbols())
    return CallError(patch.call, name, "patch.symbol: expected a symbol of the program, got another");
  return nullptr;
}

Error CallList::Build(const ProgramCreateParams& p, const Op* (*find_op)(const char* name)) {
  if (p.num_calls < 0 || p.num_patches < 0 || p.num_counts < 0 || p.num_symbols < 0)
    return "counts: expected >= 0, got a negative number";
  *this = CallList();
  CallList list;
  for (int32_t c = 0; c < p.num_calls; ++c)
    if (Error error = list.AddCall(p.calls[c], find_op(p.calls[c].op))) return error;
  list.symbols_.assign(static_cast<size_t>(p.num_symbols), 0);
  list.cu_fields_.assign(static_cast<size_t>(p.num_symbols) + 1, 0);
  for (int32_t i = 0; i < p.num_patches; ++i) {
    if (Error error = list.CheckPatch(p.patches[i], p)) return error;
    ++list.cu_fields_[p.patches[i].symbol + 1];
  }
  for (int32_t s = 0; s < p.num_symbols; ++s) list.cu_fields_[s + 1] += list.cu_fields_[s];
  list.fields_.resize(static_cast<size_t>(p.num_patches));
  std::vector<int32_t> next(list.cu_fields_.begin(), list.cu_fields_.end() - 1);
  for (int32_t i = 0; i < p.num_patches; ++i) {
    const ProgramPatch& patch = p.patches[i];
    list.fields_[next[patch.symbol]++] = {list.calls_[patch.call].offset + patch.offset, patch.num_bytes};
  }
  for (int32_t s = 0; s < p.num_symbols; ++s)
    if (Error error = list.SetSymbol(s, 0)) return error;
  *this = std::move(list);
  return nullptr;
}

Error CallList::SetSymbols(const int64_t* symbols, int32_t num_symbols) {
  if (num_symbols != this->num_symbols()) return "symbols: expected as many as the program has, got another number";
  for (int32_t s = 0; s < num_symbols; ++s) {
    if (symbols[s] == symbols_[s]) continue;
    if (Error error = SetSymbol(s, symbols[s])) return error;
  }
  return nullptr;
}

Error CallList::SetSymbol(int32_t symbol, int64_t value) {
  const bool is_count = value >= 0 && value <= std::numeric_limits<int32_t>::max();
  const auto begin = fields_.begin() + cu_fields_[symbol];
  const auto end = fields_.begin() + cu_fields_[symbol + 1];
  // All are looked at before one is written: a refused value changes nothing.
  if (!is_count && std::any_of(begin, end, [](const Field& field) { return field.num_bytes == 4; }))
    return "symbols: expected 0..2^31 - 1 for a 4-byte field, got another value";
  for (auto field = begin; field != end; ++field) {
    // A narrower field takes the low bytes: the processor is little-endian.
    std::memcpy(reinterpret_cast<char*>(memory_.data()) + field->offset, &value, static_cast<size_t>(field->num_bytes));
  }
  symbols_[symbol] = value;
  return nullptr;
}

}  // namespace fdsd
