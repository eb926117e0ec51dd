#pragma once
// Outputs of past and running requests, shared by all requests with the same salt, in bounded memory. Knows no table
// rows and no drafts.
#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "fdsd/draft.h"
#include "suffix_automaton.h"

namespace fdsd {

using SuffixSaltDigest = std::array<uint8_t, 16>;

struct SuffixShard;

// What belongs to one salt. It lives as long as it has shards or requests.
struct SuffixSalt {
  // The number of the youngest shard among all that the salt ever had; -1 before the first.
  int64_t youngest() const { return num_dropped + static_cast<int64_t>(shards.size()) - 1; }

  SuffixSaltDigest digest;
  std::vector<std::list<SuffixShard>::iterator> shards;  // oldest first
  int64_t num_dropped = 0;                               // shards it had before shards[0]
  int32_t num_requests = 0;                              // that hold on to it
};

// One automaton of a salt's outputs. Only the youngest takes tokens; it is closed when it has its share of the whole,
// and dropped as a whole when its memory is needed.
struct SuffixShard {
  SuffixSalt* salt = nullptr;
  SuffixAutomaton automaton;
  int64_t num_begun = 0;    // outputs that began here
  int64_t num_outputs = 0;  // outputs whose newest token is here, wherever they began
};

// Where a running request's output goes on.
struct SuffixWriter {
  int64_t shard = -1;  // numbered as by SuffixSalt::youngest; -1 = it has written nothing
  SuffixTail tail;
};

// At most so many outputs (-1 = any number) and bytes are kept; with 0 of either, nothing.
struct SuffixLimits {
  int64_t max_outputs;
  int64_t max_bytes;
};

// The shards of all salts, in the order in which they last took a token; the first is the next to go. A dropped shard's
// memory is given back in portions like those in which the others grow, so that no step waits for it.
class SuffixCache {
 public:
  explicit SuffixCache(SuffixLimits limits) : limits_(limits) {}
  SuffixCache(const SuffixCache&) = delete;
  SuffixCache& operator=(const SuffixCache&) = delete;

  bool is_enabled() const { return limits_.max_outputs != 0 && limits_.max_bytes != 0; }

  // Hold on to a salt, new or known, until it is given up.
  SuffixSalt* Acquire(const SuffixSaltDigest& digest);
  void GiveUp(SuffixSalt* salt);

  // Append a token of an output. A writer whose shard is closed or gone goes on in the youngest, as a new sequence of
  // the same output. Only an output that begins drops others for their number: one that was dropped while it is written
  // goes on when there is room, and its tokens until then are not kept. May drop shards of any salt.
  void Append(SuffixSalt* salt, int32_t token, SuffixWriter* writer);

  SuffixStats stats() const;

  // Call visit(salt digest, automaton, i) for sequence i of every automaton, the oldest shard's first.
  template <typename Visit>
  void ForEachSequence(Visit&& visit) const {
    for (const SuffixShard& shard : shards_) {
      for (int32_t i = 0; i < shard.automaton.num_sequences(); ++i) visit(shard.salt->digest, shard.automaton, i);
    }
  }

  // Check every automaton, the totals, the limits and the order of the shards.
  Error CheckIntegrity() const;

 private:
  static int64_t NumBytes(const SuffixShard& shard);
  // Whether the youngest shard may take one more token, or the beginning of an output.
  bool HasRoomForToken(const SuffixSalt& salt) const;
  bool HasRoomForBeginning(const SuffixSalt& salt) const;
  bool IsFull() const { return limits_.max_outputs >= 0 && num_outputs_ >= limits_.max_outputs; }
  // Let an output begin or go on in its salt's youngest shard. False if there is no room to go on.
  bool OpenSequence(SuffixSalt* salt, SuffixWriter* writer);
  void AddShard(SuffixSalt* salt);
  void AppendTo(SuffixAutomaton* automaton, int32_t token, SuffixTail* tail);
  void DropOldest();
  void ReleaseExcess();
  void EraseIfUnused(SuffixSalt* salt);

  const SuffixLimits limits_;
  std::map<SuffixSaltDigest, SuffixSalt> salts_;
  std::list<SuffixShard> shards_;   // by last append
  std::list<SuffixShard> dropped_;  // whose memory is still to be given back
  int64_t num_bytes_ = 0;
  int64_t num_outputs_ = 0;
  int64_t num_sequences_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_steps_ = 0;
  int64_t num_cut_counts_ = 0;
};

}  // namespace fdsd
