// What a SuffixDrafter holds, as plain sequences and counts.
#include <algorithm>

#include "suffix_drafter.h"

namespace fdsd {
namespace {

int64_t CountOccurrences(const SuffixAutomaton& automaton, const int32_t* tokens, int32_t num_tokens) {
  SuffixMatch match;
  for (int32_t i = 0; i < num_tokens; ++i) {
    match = automaton.Advance(match, tokens[i], num_tokens);
    if (match.length != i + 1) return 0;
  }
  return automaton.count(match.state);
}

}  // namespace

Error SuffixDrafter::Count(const SuffixCountParams& p) const {
  if (Error error = CheckTableRows(&p.table_row, 1)) return error;
  const SuffixRequest* request = rows_[static_cast<size_t>(p.table_row)].get();
  if (request == nullptr) return "table_row: expected one that was begun, got another";
  if (p.num_tokens < 1) return "num_tokens: expected >= 1, got less";
  if (static_cast<size_t>(p.max_counts) < request->salt->shards.size() + 1) {
    return "max_counts: expected room for all texts, got less";
  }
  int64_t* counts = p.counts;
  *counts++ = CountOccurrences(request->own_text, p.token_ids, p.num_tokens);
  for (const auto& shard : request->salt->shards) {
    *counts++ = CountOccurrences(shard->automaton, p.token_ids, p.num_tokens);
  }
  *p.num_counts = static_cast<int32_t>(counts - p.counts);
  return nullptr;
}

Error SuffixDrafter::Export(const SuffixSequencesParams& p) const {
  const SuffixStats now = stats();
  if (p.num_sequences != now.num_sequences || p.num_tokens != now.num_tokens) {
    return "sequences: expected arrays of the cache's sizes, got others";
  }
  int64_t q = 0;
  p.cu_tokens[0] = 0;
  Error error = nullptr;
  cache_.ForEachSequence([&](const SuffixSaltDigest& digest, const SuffixAutomaton& automaton, int32_t i) {
    // The arrays are sized by totals: no error in these may write past the end.
    if (q == p.num_sequences || p.cu_tokens[q] + automaton.CopySequence(i, nullptr) > p.num_tokens) {
      error = "sequences: expected what the totals say, got more";
      return;
    }
    std::copy(digest.begin(), digest.end(), p.salt_digests + q * static_cast<int64_t>(digest.size()));
    p.cu_tokens[q + 1] = p.cu_tokens[q] + automaton.CopySequence(i, p.token_ids + p.cu_tokens[q]);
    ++q;
  });
  return error;
}

Error SuffixDrafter::Import(const SuffixSequencesParams& p) {
  if (p.num_sequences < 0 || p.cu_tokens[0] != 0 || p.cu_tokens[p.num_sequences] != p.num_tokens) {
    return "cu_tokens: expected offsets from 0 to the number of tokens, got others";
  }
  for (int64_t q = 0; q < p.num_sequences; ++q) {
    if (p.cu_tokens[q + 1] < p.cu_tokens[q]) return "cu_tokens: expected rising offsets, got a decrease";
  }
  if (Error error = CheckTokens(p.token_ids, p.num_tokens)) return error;
  for (int64_t q = 0; q < p.num_sequences && cache_.is_enabled(); ++q) {
    SuffixSaltDigest digest;
    std::copy_n(p.salt_digests + q * static_cast<int64_t>(digest.size()), digest.size(), digest.begin());
    SuffixSalt* salt = cache_.Acquire(digest);
    SuffixWriter writer;
    for (int64_t t = p.cu_tokens[q]; t < p.cu_tokens[q + 1]; ++t) cache_.Append(salt, p.token_ids[t], &writer);
    cache_.GiveUp(salt);
  }
  return nullptr;
}

CallStatus SuffixCreate(const SuffixCreateParams& p) {
  if (Error error = SuffixDrafter::CheckCreate(p)) return error;
  *p.drafter = new SuffixDrafter(p);
  return nullptr;
}

CallStatus SuffixBegin(const SuffixBeginParams& p) { return p.drafter->Begin(p); }

CallStatus SuffixForget(const DraftTableRowsParams& p) {
  return static_cast<SuffixDrafter*>(p.drafter)->Forget(p.table_rows, p.count);
}

CallStatus SuffixPropose(const DraftProposeParams& p) { return static_cast<SuffixDrafter*>(p.drafter)->Propose(p); }

CallStatus SuffixExport(const SuffixSequencesParams& p) { return p.drafter->Export(p); }

CallStatus SuffixImport(const SuffixSequencesParams& p) { return p.drafter->Import(p); }

CallStatus SuffixCount(const SuffixCountParams& p) { return p.drafter->Count(p); }

}  // namespace fdsd
