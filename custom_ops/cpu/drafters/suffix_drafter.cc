#include "suffix_drafter.h"

#include <algorithm>
#include <cmath>

#include "draft_tree.h"
#include "for_each_row.h"

namespace fdsd {

void SuffixRequest::FollowShards() {
  const auto num_gone = std::min(salt->num_dropped - first_shard, static_cast<int64_t>(matches.size()));
  matches.erase(matches.begin(), matches.begin() + num_gone);
  matches.resize(salt->shards.size());
  first_shard = salt->num_dropped;
}

bool SuffixRequest::EndsWith(int32_t index, int32_t token) const {
  return index >= first_end && std::find(end_token_ids.begin(), end_token_ids.end(), token) != end_token_ids.end();
}

// A row of a step.
struct SuffixDrafter::Row {
  SuffixRequest* request;
  const int32_t* tokens;  // of the table row
  int32_t begin, end;     // those to be read
  int64_t first_open;     // shards from this number on take tokens in this step
  const int32_t* prefix;
  int32_t num_prefix;
  int32_t max_drafts;
  int32_t* drafts;    // room for max_drafts
  float* draft_prob;  // likewise; nullptr = unwanted
  int32_t* parents;   // likewise; nullptr = a chain
  DraftEvidence evidence;
  int32_t num_drafts;
};

Error SuffixDrafter::CheckCreate(const SuffixCreateParams& p) {
  if (p.num_table_rows < 0) return "num_table_rows: expected >= 0, got a negative number";
  if (p.vocab_size < 1) return "vocab_size: expected >= 1, got less";
  if (p.max_context < 1) return "max_context: expected >= 1, got less";
  if (!(p.max_factor >= 0) || std::isinf(p.max_factor)) return "max_factor: expected a finite number >= 0, got another";
  if (!(p.min_token_prob >= 0 && p.min_token_prob <= 1)) return "min_token_prob: expected 0 to 1, got another number";
  if (p.max_cached_outputs < -1) return "max_cached_outputs: expected >= -1, got less";
  if (p.max_cached_bytes < 0) return "max_cached_bytes: expected >= 0, got a negative number";
  return nullptr;
}

SuffixDrafter::SuffixDrafter(const SuffixCreateParams& p)
    : rule_{p.max_context, p.max_factor, p.min_token_prob, p.follows_copies != 0},
      vocab_size_(p.vocab_size),
      cache_({p.max_cached_outputs, p.max_cached_bytes}),
      rows_(static_cast<size_t>(p.num_table_rows)) {}

Error SuffixDrafter::CheckTableRows(const int32_t* table_rows, int32_t count) const {
  for (int32_t i = 0; i < count; ++i) {
    if (table_rows[i] < 0 || static_cast<size_t>(table_rows[i]) >= rows_.size()) {
      return "table_rows: expected 0 to num_table_rows - 1, got one outside";
    }
  }
  return nullptr;
}

Error SuffixDrafter::Begin(const SuffixBeginParams& p) {
  if (Error error = Forget(&p.table_row, 1)) return error;
  if (p.num_tokens < 0) return "num_tokens: expected >= 0, got a negative number";
  if (p.num_end_token_ids < 0) return "num_end_token_ids: expected >= 0, got a negative number";
  SuffixSaltDigest digest;
  std::copy_n(p.salt_digest, digest.size(), digest.begin());
  auto request = std::make_unique<SuffixRequest>();
  request->salt = cache_.Acquire(digest);
  request->num_private = p.num_tokens;
  request->first_end = p.first_end;
  request->end_token_ids.assign(p.end_token_ids, p.end_token_ids + p.num_end_token_ids);
  request->FollowShards();
  rows_[static_cast<size_t>(p.table_row)] = std::move(request);
  return nullptr;
}

Error SuffixDrafter::Forget(const int32_t* table_rows, int32_t count) {
  if (Error error = CheckTableRows(table_rows, count)) return error;
  for (int32_t i = 0; i < count; ++i) {
    std::unique_ptr<SuffixRequest> request = std::move(rows_[static_cast<size_t>(table_rows[i])]);
    if (request != nullptr) cache_.GiveUp(request->salt);
  }
  return nullptr;
}

Error SuffixDrafter::CheckTokens(const int32_t* tokens, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size_) return "token ids: expected 0 to vocab_size - 1, got one outside";
  }
  return nullptr;
}

Error SuffixDrafter::CheckRow(const DraftProposeParams& p, int32_t r) const {
  if (p.table_rows[r] >= p.num_table_rows) return "table_rows: expected rows of token_table, got one outside";
  if (p.max_draft_len[r] < 0) return "max_draft_len: expected >= 0, got a negative length";
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[r + 1] < p.cu_num_prefix[r]) {
    return "cu_num_prefix: expected rising offsets, got a decrease";
  }
  const SuffixRequest* request = rows_[static_cast<size_t>(p.table_rows[r])].get();
  if (request == nullptr) {
    return p.max_draft_len[r] == 0 ? nullptr
                                   : "table_rows: expected to draft for table rows that were begun, got another";
  }
  if (p.num_tokens[r] < request->num_read) {
    return "num_tokens: expected no fewer than in the table row's last step, got fewer";
  }
  if (p.num_tokens[r] > p.max_tokens_per_row) return "num_tokens: expected at most a row of token_table, got more";
  const int32_t* tokens = p.token_table + static_cast<int64_t>(p.table_rows[r]) * p.max_tokens_per_row;
  return CheckTokens(tokens + request->num_read, p.num_tokens[r] - request->num_read);
}

Error SuffixDrafter::CheckRows(const DraftProposeParams& p) const {
  if (Error error = CheckTableRows(p.table_rows, p.num_rows)) return error;
  if (p.cu_num_prefix != nullptr && p.cu_num_prefix[0] != 0) {
    return "cu_num_prefix: expected to start at 0, got another number";
  }
  int64_t num_allowed = 0;
  std::vector<bool> is_row(rows_.size());
  for (int32_t r = 0; r < p.num_rows; ++r) {
    if (is_row[static_cast<size_t>(p.table_rows[r])]) return "table_rows: expected none twice, got one that is";
    is_row[static_cast<size_t>(p.table_rows[r])] = true;
    if (Error error = CheckRow(p, r)) return error;
    num_allowed += p.max_draft_len[r];
  }
  if (num_allowed > p.max_num_drafts) return "max_num_drafts: expected the sum of max_draft_len, got less";
  return p.cu_num_prefix == nullptr ? nullptr : CheckTokens(p.prefix_token_ids, p.cu_num_prefix[p.num_rows]);
}

std::vector<SuffixDrafter::Row> SuffixDrafter::MakeRows(const DraftProposeParams& p) const {
  std::vector<Row> rows;
  int32_t num_before = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    Row row{};
    row.request = rows_[static_cast<size_t>(p.table_rows[r])].get();
    row.drafts = p.draft_token_ids + num_before;
    row.draft_prob = p.draft_prob == nullptr ? nullptr : p.draft_prob + num_before;
    row.parents = p.draft_parents == nullptr ? nullptr : p.draft_parents + num_before;
    num_before += row.max_drafts = p.max_draft_len[r];
    if (row.request != nullptr) {
      row.tokens = p.token_table + static_cast<int64_t>(p.table_rows[r]) * p.max_tokens_per_row;
      row.begin = row.request->num_read;
      row.end = p.num_tokens[r];
      row.first_open = std::max<int64_t>(0, row.request->salt->youngest());
    }
    if (p.cu_num_prefix != nullptr) {
      row.prefix = p.prefix_token_ids + p.cu_num_prefix[r];
      row.num_prefix = p.cu_num_prefix[r + 1] - p.cu_num_prefix[r];
    }
    rows.push_back(row);
  }
  return rows;
}

Error SuffixDrafter::Propose(const DraftProposeParams& p) {
  if (Error error = CheckRows(p)) return error;
  std::vector<Row> rows = MakeRows(p);
  const auto for_each = [&](auto&& body) {
    ForEachRow(p.num_rows, [&](int32_t r) {
      Row& row = rows[static_cast<size_t>(r)];
      if (row.request != nullptr) body(&row);
    });
  };
  for_each([&](Row* row) { ReadOwn(*row); });
  // What rows share is written in their order, on one thread.
  for (size_t r = 0; r < rows.size(); ++r) {
    if (r + 1 < rows.size()) PrefetchShared(rows[r + 1]);
    if (rows[r].request != nullptr) ReadShared(rows[r]);
  }
  for_each([&](Row* row) { Draft(row); });
  p.cu_num_draft[0] = 0;
  for (int32_t r = 0; r < p.num_rows; ++r) {
    const Row& row = rows[static_cast<size_t>(r)];
    std::copy_n(row.drafts, row.num_drafts, p.draft_token_ids + p.cu_num_draft[r]);
    if (p.draft_prob != nullptr) std::copy_n(row.draft_prob, row.num_drafts, p.draft_prob + p.cu_num_draft[r]);
    if (p.draft_parents != nullptr) std::copy_n(row.parents, row.num_drafts, p.draft_parents + p.cu_num_draft[r]);
    if (p.evidence != nullptr) row.evidence.Write(p.evidence + r * DraftEvidence::kNumFields);
    p.cu_num_draft[r + 1] = p.cu_num_draft[r] + row.num_drafts;
  }
  return nullptr;
}

// Go on with a match of the own text, and with the copy that it may be part of.
void SuffixDrafter::ReadToken(const SuffixAutomaton& own_text, int32_t token, SuffixMatch* match,
                              SuffixCopy* copy) const {
  const SuffixMatch before = *match;
  *match = own_text.Advance(before, token, rule_.max_context);
  if (rule_.follows_copies) copy->Read(own_text, token, before, *match, rule_.max_context);
}

// Read the row's new tokens into its own automaton and match them in the closed shards, which no row writes.
void SuffixDrafter::ReadOwn(const Row& row) const {
  SuffixRequest& request = *row.request;
  for (int32_t t = row.begin; t < row.end; ++t) {
    // The match first: it must be an earlier occurrence.
    ReadToken(request.own_text, row.tokens[t], &request.match, &request.copy);
    request.own_text.Append(row.tokens[t], &request.tail);
  }
  request.num_read = row.end;
  request.FollowShards();
  const int32_t first = FirstMatched(row);
  for (size_t i = 0; request.first_shard + static_cast<int64_t>(i) < row.first_open; ++i) {
    for (int32_t t = first; t < row.end; ++t) {
      request.matches[i] =
          request.salt->shards[i]->automaton.Advance(request.matches[i], row.tokens[t], rule_.max_context);
    }
  }
}

// Of many new tokens only the last ones can be in a match; they push out whatever it held before.
int32_t SuffixDrafter::FirstMatched(const Row& row) const { return std::max(row.begin, row.end - rule_.max_context); }

// What reading the row's new tokens in the shards that are written in this step begins with.
void SuffixDrafter::PrefetchShared(const Row& row) {
  if (row.request == nullptr) return;
  const SuffixRequest& request = *row.request;
  for (size_t i = 0; i < std::min(request.matches.size(), request.salt->shards.size()); ++i) {
    const SuffixWriter& writer = request.writer;
    request.salt->shards[i]->automaton.Prefetch(request.matches[i].state);
    if (writer.shard == request.first_shard + static_cast<int64_t>(i))
      request.salt->shards[i]->automaton.Prefetch(writer.tail.state);
  }
}

// Match the row's new tokens in the shards that this step writes, and write the row's output up to its end. Drafts that
// were accepted after a stop are in the table, but are no output.
void SuffixDrafter::ReadShared(const Row& row) {
  SuffixRequest& request = *row.request;
  const int32_t first_matched = FirstMatched(row);
  const int32_t first_shared = std::max(row.begin, request.num_private);
  for (int32_t t = std::min(first_matched, first_shared); t < row.end; ++t) {
    request.FollowShards();
    if (t >= first_matched) {
      const int64_t first_open = std::max<int64_t>(0, row.first_open - request.first_shard);
      for (auto i = static_cast<size_t>(first_open); i < request.matches.size(); ++i) {
        SuffixMatch& match = request.matches[i];
        match = request.salt->shards[i]->automaton.Advance(match, row.tokens[t], rule_.max_context);
      }
    }
    if (t < first_shared || request.has_ended || !cache_.is_enabled()) continue;
    if (request.writer.shard < 0) ShareBeginning(row);
    cache_.Append(request.salt, row.tokens[t], &request.writer);
    request.has_ended = request.EndsWith(t, row.tokens[t]);
  }
}

// What an output follows is shared with its first token, as far as a match can see it: so a prompt that was there
// before is known from its end.
void SuffixDrafter::ShareBeginning(const Row& row) {
  SuffixRequest& request = *row.request;
  for (int32_t t = std::max(0, request.num_private - rule_.max_context); t < request.num_private; ++t) {
    cache_.Append(request.salt, row.tokens[t], &request.writer);
  }
}

// Put the copy that the row's text and prefix end with before all plain matches, if it says more than they do.
void SuffixDrafter::AddCopy(const Row& row, std::vector<SuffixSource>* sources) const {
  const SuffixRequest& request = *row.request;
  SuffixMatch match = request.match;
  SuffixCopy copy = request.copy;
  for (int32_t i = 0; i < row.num_prefix; ++i) ReadToken(request.own_text, row.prefix[i], &match, &copy);
  match = copy.Choose(sources->empty() ? SuffixMatch{} : sources->front().match);
  match = request.own_text.Settle(match, rule_.max_context);
  if (match.length == 0) return;
  const int32_t tail_length = row.num_prefix == 0 ? copy.recent() : 0;
  sources->insert(sources->begin(), {&request.own_text, match, request.tail.state, tail_length, copy.recent(), true});
}

void SuffixDrafter::Draft(Row* row) const {
  if (row->max_drafts == 0) return;
  SuffixRequest& request = *row->request;
  // Other rows may have dropped shards since.
  request.FollowShards();
  std::vector<SuffixSource> sources;
  const auto add = [&](const SuffixAutomaton& automaton, SuffixMatch match, const SuffixTail* tail) {
    match = automaton.Settle(match, rule_.max_context);
    for (int32_t i = 0; i < row->num_prefix; ++i) {
      match = automaton.Advance(match, row->prefix[i], rule_.max_context);
    }
    if (match.length == 0) return;
    SuffixSource source{&automaton, match, SuffixAutomaton::kNone, 0, match.length, &automaton == &request.own_text};
    if (tail != nullptr) source.tail_state = tail->state;
    if (tail != nullptr && row->num_prefix == 0) source.tail_length = tail->length;
    const auto is_longer = [](const SuffixSource& a, const SuffixSource& b) { return a.match.length > b.match.length; };
    sources.insert(std::upper_bound(sources.begin(), sources.end(), source, is_longer), source);
  };
  add(request.own_text, request.match, &request.tail);
  for (size_t i = request.matches.size(); i-- > 0;) {
    const bool is_written = request.writer.shard == request.first_shard + static_cast<int64_t>(i);
    add(request.salt->shards[i]->automaton, request.matches[i], is_written ? &request.writer.tail : nullptr);
  }
  AddCopy(*row, &sources);
  const int32_t most =
      row->parents == nullptr ? row->max_drafts : DraftTree::MaxNodes(row->max_drafts, row->num_prefix);
  row->num_drafts = DraftFromSuffixes(rule_, sources, most, row->drafts, row->parents, row->draft_prob, &row->evidence);
}

}  // namespace fdsd
