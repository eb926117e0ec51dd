#include "suffix_copy.h"

#include <algorithm>

namespace fdsd {
namespace {

// The match with its most frequent continuation, length 0 if nothing follows it.
SuffixMatch Continue(const SuffixAutomaton& own, SuffixMatch match, int32_t max_context) {
  match = own.Settle(match, max_context);
  const int32_t next = own.best(match.state);
  return next == SuffixAutomaton::kNone ? SuffixMatch{} : own.Settle({next, match.length + 1}, max_context);
}

}  // namespace

void SuffixCopy::Read(const SuffixAutomaton& own, int32_t token, SuffixMatch before, SuffixMatch after,
                      int32_t max_context) {
  const auto goes_on = [&](SuffixMatch match, SuffixMatch next) {
    return next.length == std::min(match.length + 1, max_context);
  };
  if (match_.length == 0) {
    if (before.length < kMinLength || goes_on(before, after)) return;
    match_ = before;
    trail_.Begin(before.length);
  }
  const SuffixMatch next = own.Advance(match_, token, max_context);
  const bool agrees = goes_on(match_, next);
  const bool survives = trail_.Follow(agrees, kMinLength);
  match_ = agrees ? next : survives ? Continue(own, match_, max_context) : SuffixMatch{};
  const bool is_beaten = trail_.recent() > 0 && trail_.IsBeatenBy(after.length);
  if (is_beaten || after.length >= match_.length) match_ = {};
}

}  // namespace fdsd
