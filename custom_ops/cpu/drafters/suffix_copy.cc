#include "suffix_copy.h"

#include <algorithm>

namespace fdsd {
namespace {

// The match with its most frequent continuation, length 0 if nothing follows it.
SuffixMatch Continue(const SuffixAutomaton& own_text, SuffixMatch match, int32_t max_context) {
  match = own_text.Settle(match, max_context);
  const int32_t next = own_text.best(match.state);
  return next == SuffixAutomaton::kNone ? SuffixMatch{} : own_text.Settle({next, match.length + 1}, max_context);
}

}  // namespace

void SuffixCopy::Read(const SuffixAutomaton& own_text, int32_t token, SuffixMatch before, SuffixMatch after,
                      int32_t max_context) {
  const auto goes_on = [&](SuffixMatch match, SuffixMatch next) {
    return next.length == std::min(match.length + 1, max_context);
  };
  if (match_.length == 0) {
    if (before.length < kMinLength || goes_on(before, after)) return;
    match_ = before;
    tracker_.Begin(before.length);
  }
  const SuffixMatch next = own_text.Advance(match_, token, max_context);
  const bool agrees = goes_on(match_, next);
  const bool survives = tracker_.Follow(agrees, kMinLength);
  match_ = agrees ? next : survives ? Continue(own_text, match_, max_context) : SuffixMatch{};
  const bool is_beaten = tracker_.recent() > 0 && tracker_.IsBeatenBy(after.length);
  if (is_beaten || after.length >= match_.length) match_ = {};
}

}  // namespace fdsd
