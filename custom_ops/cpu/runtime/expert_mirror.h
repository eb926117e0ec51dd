#pragma once
// Lets ranks of several hosts share experts as if they shared memory.
//
// Each host has a segment of its own with places for all ranks. A mirror stands in it for the ranks of other hosts. It
// reads jobs of this host's ranks as those would, and sends what concerns a host there, each row once. It writes jobs
// that come as their homes would, and sends back what this host's ranks make of them. So the rules of the segment hold
// unchanged: no rank knows where another one is.
//
// What travels are frames, in order while a connection lasts. When one begins, all is sent anew: a job that is run
// twice has the same results.
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "expert_segment.h"

namespace fdsd {

enum class MirrorKind : int32_t { kRank = 1, kSlots, kTarget, kCounts, kJob, kResults };

// Before the body of a frame. Numbers that a kind does not need are 0.
struct MirrorHeader {
  uint32_t magic;
  uint32_t version;
  ExpertServiceShape shape;
  MirrorKind kind;
  int32_t rank;    // that it is about; of results: the home of the job
  int32_t server;  // of results: who ran the pairs
  int32_t layer;
  int32_t num_rows;
  int32_t num_pairs;
  int32_t state;  // of a rank; of results: 1 = the job was sent back
  int32_t incarnation;
  uint64_t seq;  // of the job, where its home is
};

class ExpertMirror {
 public:
  // Ranks are laid over hosts in order, equally many on each. `news` is an eventfd.
  ExpertMirror(std::unique_ptr<ExpertSegment> segment, int32_t host, int32_t num_hosts, int32_t news);
  ~ExpertMirror();

  int64_t frame_bytes() const { return frame_bytes_; }  // of the longest frame
  // A connection with a host begins, or has ended: its ranks are then loading, or gone if they were about to leave.
  void Begin(int32_t host);
  void Lose(int32_t host);
  // The next frame for a host; returns its bytes, 0 = there is nothing to be told as yet.
  int64_t Collect(int32_t host, char* frame);
  // An error where a frame of the host is none that this mirror can have been sent; nothing was written then.
  Error Apply(int32_t host, const char* frame, int64_t num_bytes);

 private:
  // What a host has been told since its connection began.
  struct Peer {
    bool is_connected = false;
    std::vector<uint64_t> sent;    // [ranks of a host] number of the last job
    std::vector<int64_t> states;   // [ranks of a host] state and incarnation, -1 = not yet
    std::vector<int64_t> counts;   // [ranks of a host] rows of all experts
    std::vector<int32_t> targets;  // [L] versions
    uint64_t slots = 0;            // version of the table, plus 1
    int64_t counted = 0;           // when counts were told
  };
  // A job of another host's rank, in this host's segment.
  struct Guest {
    uint64_t home_seq = 0;   // 0 = none whose results are wanted
    uint64_t answered = 0;   // bits: ranks of this host whose results were sent
    std::vector<char> next;  // the frame of a job that waits until the last one is over
  };

  bool IsOf(int32_t rank, int32_t host) const { return rank >= host * per_host_ && rank < (host + 1) * per_host_; }
  int32_t first(int32_t host) const { return host * per_host_; }
  MirrorHeader HeaderOf(MirrorKind kind, int32_t rank) const;
  int64_t CollectRank(Peer* peer, char* frame) const;
  int64_t CollectSlots(Peer* peer, char* frame) const;
  int64_t CollectTarget(Peer* peer, char* frame) const;
  int64_t CollectCounts(Peer* peer, char* frame) const;
  int64_t CollectResults(int32_t host, char* frame);
  int64_t CollectJob(int32_t host, char* frame);
  bool IsAsked(int32_t home, int32_t host) const;
  Error Check(int32_t host, const MirrorHeader& header, int64_t num_bytes) const;
  Error CheckJob(const MirrorHeader& header, const char* body) const;
  void WriteSlots(int32_t host, const char* body);
  void WriteCounts(int32_t rank, const char* body);
  void WriteTarget(int32_t layer, const char* body);
  void WriteJob(const MirrorHeader& header, const char* body);
  void WriteResults(const MirrorHeader& header, const char* body);
  void TakeNext(int32_t rank);
  void Watch(int32_t news);

  const std::unique_ptr<ExpertSegment> segment_;
  const ExpertServiceShape shape_;
  const int32_t host_;
  const int32_t per_host_;
  const int64_t frame_bytes_;
  std::vector<Peer> peers_;
  std::vector<Guest> guests_;    // by rank
  std::vector<int32_t> row_of_;  // [capacity] of a job's row among those that are sent, -1 = it is not
  std::atomic<bool> quit_{false};
  std::thread thread_;
};

}  // namespace fdsd
