#include "suffix_cache.h"

#include <algorithm>
#include <iterator>

namespace fdsd {
namespace {

// Shards a full cache is made of: dropping one forgets this part of it, and a request carries a match in each.
constexpr int64_t kNumShares = 8;
// Edges of an automaton are numbered up to 1 GiB of them.
constexpr int64_t kMaxShardBytes = int64_t{1} << 30;
// Memory given back at a time.
constexpr int64_t kReleaseBytes = 256 << 10;
// What a shard takes in addition to its automaton: its list and map entries, and those of its salt.
constexpr int64_t kShardOverheadBytes = sizeof(SuffixShard) - sizeof(SuffixAutomaton) + sizeof(SuffixSalt) + 128;

}  // namespace

int64_t SuffixCache::NumBytes(const SuffixShard& shard) { return shard.automaton.num_bytes() + kShardOverheadBytes; }

SuffixSalt* SuffixCache::Acquire(const SuffixSaltDigest& digest) {
  SuffixSalt& salt = salts_[digest];
  salt.digest = digest;
  ++salt.num_requests;
  return &salt;
}

void SuffixCache::GiveUp(SuffixSalt* salt) {
  --salt->num_requests;
  EraseIfUnused(salt);
}

void SuffixCache::EraseIfUnused(SuffixSalt* salt) {
  if (salt->num_requests == 0 && salt->shards.empty()) salts_.erase(SuffixSaltDigest(salt->digest));
}

bool SuffixCache::HasRoomForToken(const SuffixSalt& salt) const {
  const int64_t max_bytes = std::min(kMaxShardBytes, limits_.max_bytes / kNumShares);
  return !salt.shards.empty() && salt.shards.back()->automaton.num_bytes() < max_bytes;
}

bool SuffixCache::HasRoomForBeginning(const SuffixSalt& salt) const {
  const int64_t max_begun = std::max<int64_t>(1, limits_.max_outputs / kNumShares);
  return HasRoomForToken(salt) && (limits_.max_outputs < 0 || salt.shards.back()->num_begun < max_begun);
}

void SuffixCache::AddShard(SuffixSalt* salt) {
  salt->shards.reserve(salt->shards.size() + 1);  // so that nothing can fail once the shard exists
  SuffixShard& shard = shards_.emplace_back();
  shard.salt = salt;
  salt->shards.push_back(std::prev(shards_.end()));
  num_bytes_ += NumBytes(shard);
}

bool SuffixCache::OpenSequence(SuffixSalt* salt, SuffixWriter* writer) {
  const bool begins = writer->shard < 0;
  const bool is_kept = writer->shard >= salt->num_dropped;
  if (!begins && !is_kept && IsFull()) return false;
  while (begins && IsFull()) DropOldest();
  if (!(begins ? HasRoomForBeginning(*salt) : HasRoomForToken(*salt))) AddShard(salt);
  if (is_kept) {
    --salt->shards[static_cast<size_t>(writer->shard - salt->num_dropped)]->num_outputs;
    --num_outputs_;
  }
  SuffixShard& shard = *salt->shards.back();
  shard.num_begun += begins;
  ++shard.num_outputs;
  ++num_outputs_;
  *writer = {salt->youngest(), {}};
  return true;
}

void SuffixCache::Append(SuffixSalt* salt, int32_t token, SuffixWriter* writer) {
  if (writer->shard != salt->youngest() || !HasRoomForToken(*salt)) {
    if (!OpenSequence(salt, writer)) return;
  }
  const auto shard = salt->shards.back();
  AppendTo(&shard->automaton, token, &writer->tail);
  shards_.splice(shards_.end(), shards_, shard);
  ReleaseExcess();
}

// Append, and bring the totals up to date also where memory runs out on the way.
void SuffixCache::AppendTo(SuffixAutomaton* automaton, int32_t token, SuffixTail* tail) {
  const auto add = [this, automaton](int64_t sign) {
    num_bytes_ += sign * automaton->num_bytes();
    num_tokens_ += sign * automaton->num_tokens();
    num_sequences_ += sign * automaton->num_sequences();
    num_steps_ += sign * automaton->num_steps();
    num_cut_counts_ += sign * automaton->num_cut_counts();
  };
  add(-1);
  try {
    automaton->Append(token, tail);
  } catch (...) {
    add(1);
    throw;
  }
  add(1);
}

void SuffixCache::DropOldest() {
  SuffixSalt* salt = shards_.front().salt;
  num_outputs_ -= shards_.front().num_outputs;
  num_sequences_ -= shards_.front().automaton.num_sequences();
  num_tokens_ -= shards_.front().automaton.num_tokens();
  // A salt's older shards took their last token before its younger ones did.
  salt->shards.erase(salt->shards.begin());
  ++salt->num_dropped;
  dropped_.splice(dropped_.end(), shards_, shards_.begin());
  dropped_.back().salt = nullptr;
  EraseIfUnused(salt);
}

void SuffixCache::ReleaseExcess() {
  while (num_bytes_ > limits_.max_bytes) {
    if (dropped_.empty()) DropOldest();
    SuffixShard& shard = dropped_.front();
    const int64_t num_bytes = NumBytes(shard);
    if (shard.automaton.Release(kReleaseBytes) > 0) {
      num_bytes_ -= num_bytes - NumBytes(shard);
    } else {
      num_bytes_ -= num_bytes;
      dropped_.pop_front();
    }
  }
}

SuffixStats SuffixCache::stats() const {
  return {num_bytes_,
          num_tokens_,
          num_outputs_,
          num_sequences_,
          static_cast<int64_t>(shards_.size()),
          static_cast<int64_t>(salts_.size()),
          num_steps_,
          num_cut_counts_};
}

}  // namespace fdsd
