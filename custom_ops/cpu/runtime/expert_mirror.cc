// What a host is told.
#include "expert_mirror.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "expert_mirror_frame.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

constexpr int64_t kCountsNs = 1'000'000'000;  // between two frames of counts

int64_t LongestFrame(const ExpertSegment& segment, int32_t per_host) {
  const ExpertServiceShape& s = segment.shape();
  int64_t longest = 0;
  for (const MirrorKind kind : {MirrorKind::kRank, MirrorKind::kSlots, MirrorKind::kTarget, MirrorKind::kCounts,
                                MirrorKind::kJob, MirrorKind::kResults})
    longest = std::max(longest, MirrorBodyBytes(s, per_host, kind, segment.capacity(), segment.max_pairs()));
  return static_cast<int64_t>(sizeof(MirrorHeader)) + longest;
}

}  // namespace

ExpertMirror::ExpertMirror(std::unique_ptr<ExpertSegment> segment, int32_t host, int32_t num_hosts, int32_t news)
    : segment_(std::move(segment)),
      shape_(segment_->shape()),
      host_(host),
      per_host_(shape_.num_ranks / num_hosts),
      frame_bytes_(LongestFrame(*segment_, per_host_)),
      peers_(static_cast<size_t>(num_hosts)),
      guests_(static_cast<size_t>(shape_.num_ranks)),
      row_of_(static_cast<size_t>(segment_->capacity())) {
  for (int32_t r = 0; r < shape_.num_ranks; ++r) segment_->rank(r).is_elsewhere.store(!IsOf(r, host_));
  segment_->mirror().asleep.store(kThreadAsleep | kCallerAsleep);
  thread_ = std::thread([this, news] { Watch(news); });
}

ExpertMirror::~ExpertMirror() {
  quit_.store(true);
  SharedWakeAll(&segment_->mirror().wake);
  thread_.join();
}

// Say on the eventfd that ranks have woken the mirror.
void ExpertMirror::Watch(int32_t news) {
  std::atomic<uint32_t>& wake = segment_->mirror().wake;
  for (uint32_t seen = wake.load(); !quit_.load();) {
    SharedNap(&wake, seen, kNapNanoseconds);
    if (const uint32_t now = wake.load(); now != seen) {
      seen = now;
      eventfd_write(news, 1);
    }
  }
}

void ExpertMirror::Begin(int32_t host) {
  Peer& peer = peers_[host];
  const size_t ranks = static_cast<size_t>(per_host_);
  peer = {true, std::vector<uint64_t>(ranks), std::vector<int64_t>(ranks, -1), std::vector<int64_t>(ranks),
          std::vector<int32_t>(static_cast<size_t>(shape_.num_layers))};
  for (int32_t r = first(host); r < first(host + 1); ++r) guests_[r] = {};
}

void ExpertMirror::Lose(int32_t host) {
  peers_[host].is_connected = false;
  for (int32_t r = first(host); r < first(host + 1); ++r) {
    guests_[r] = {};
    const ExpertRankState state = segment_->rank(r).State();
    const bool was_leaving = state == ExpertRankState::kLeaving || state == ExpertRankState::kGone;
    segment_->rank(r).SetState(was_leaving ? ExpertRankState::kGone : ExpertRankState::kLoading);
  }
}

int64_t ExpertMirror::Collect(int32_t host, char* frame) {
  Peer& peer = peers_[host];
  if (!peer.is_connected) return 0;
  for (int32_t r = first(host); r < first(host + 1); ++r) TakeNext(r);
  // States and tables come before results that may follow from them.
  if (const int64_t bytes = CollectRank(&peer, frame)) return bytes;
  if (const int64_t bytes = CollectSlots(&peer, frame)) return bytes;
  if (const int64_t bytes = CollectTarget(&peer, frame)) return bytes;
  if (const int64_t bytes = CollectResults(host, frame)) return bytes;
  if (const int64_t bytes = CollectJob(host, frame)) return bytes;
  return CollectCounts(&peer, frame);
}

MirrorHeader ExpertMirror::HeaderOf(MirrorKind kind, int32_t rank) const {
  MirrorHeader header{};
  header.magic = kMirrorMagic;
  header.version = kMirrorVersion;
  header.shape = shape_;
  header.kind = kind;
  header.rank = rank;
  return header;
}

int64_t ExpertMirror::CollectRank(Peer* peer, char* frame) const {
  for (int32_t i = 0; i < per_host_; ++i) {
    const ExpertRank& rank = segment_->rank(first(host_) + i);
    MirrorHeader header = HeaderOf(MirrorKind::kRank, first(host_) + i);
    header.state = static_cast<int32_t>(segment_->LiveState(first(host_) + i));
    header.incarnation = rank.incarnation.load(std::memory_order_acquire);
    const int64_t state = int64_t{header.incarnation} << 8 | header.state;
    if (peer->states[i] == state) continue;
    // Who hears of a rank that serves shall have its table.
    if (header.state == static_cast<int32_t>(ExpertRankState::kServing))
      if (const int64_t bytes = CollectSlots(peer, frame)) return bytes;
    peer->states[i] = state;
    return MirrorWriter(frame, header).num_bytes();
  }
  return 0;
}

int64_t ExpertMirror::CollectSlots(Peer* peer, char* frame) const {
  const uint64_t version = segment_->version().load(std::memory_order_seq_cst);
  if (peer->slots == version + 1) return 0;
  MirrorWriter writer(frame, HeaderOf(MirrorKind::kSlots, first(host_)));
  for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
    const std::atomic<int32_t>* const own = segment_->slots(layer) + first(host_) * shape_.num_slots;
    for (int32_t s = 0; s < per_host_ * shape_.num_slots; ++s)
      writer.Put(std::max(own[s].load(std::memory_order_acquire), 0));
  }
  // An expert that moved meanwhile may be in neither slot: it is read again.
  if (segment_->version().load(std::memory_order_seq_cst) != version) return 0;
  peer->slots = version + 1;
  return writer.num_bytes();
}

int64_t ExpertMirror::CollectTarget(Peer* peer, char* frame) const {
  // The planner is with the first rank.
  for (int32_t layer = 0; host_ == 0 && layer < shape_.num_layers; ++layer) {
    const std::atomic<int32_t>* const target = segment_->target(layer);
    const int32_t version = target[0].load();
    if (version % 2 != 0 || version == peer->targets[layer]) continue;
    MirrorHeader header = HeaderOf(MirrorKind::kTarget, 0);
    header.layer = layer;
    MirrorWriter writer(frame, header);
    for (int32_t s = 1; s <= shape_.num_ranks * shape_.num_slots; ++s) writer.Put(target[s].load());
    if (target[0].load() != version) continue;
    peer->targets[layer] = version;
    return writer.num_bytes();
  }
  return 0;
}

int64_t ExpertMirror::CollectCounts(Peer* peer, char* frame) const {
  if (MonotonicNs() < peer->counted + kCountsNs) return 0;
  for (int32_t i = 0; i < per_host_; ++i) {
    int64_t sum = 0;
    MirrorWriter writer(frame, HeaderOf(MirrorKind::kCounts, first(host_) + i));
    for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int32_t e = 0; e < shape_.num_experts; ++e) {
        const int64_t rows = segment_->counts(first(host_) + i, layer)[e].load(std::memory_order_relaxed);
        writer.Put(rows);
        sum += rows;
      }
    }
    for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
      const int64_t rows = segment_->served(first(host_) + i)[layer].load(std::memory_order_relaxed);
      writer.Put(rows);
      sum += rows;
    }
    if (sum == peer->counts[i]) continue;
    peer->counts[i] = sum;
    return writer.num_bytes();
  }
  peer->counted = MonotonicNs();
  return 0;
}

int64_t ExpertMirror::CollectResults(int32_t host, char* frame) {
  for (int32_t home = first(host); home < first(host + 1); ++home) {
    Guest& guest = guests_[home];
    const ExpertJob& job = segment_->job(home);
    const uint64_t seq = job.seq.load(std::memory_order_relaxed);
    for (int32_t i = 0; guest.home_seq != 0 && i < per_host_; ++i) {
      const int32_t server = first(host_) + i;
      const int32_t begin = job.first_pair[server];
      const int32_t count = job.first_pair[server + 1] - begin;
      const uint64_t done = job.done[server].word.load(std::memory_order_acquire);
      if (count == 0 || done / 2 < seq || (guest.answered >> i & 1) != 0) continue;
      guest.answered |= uint64_t{1} << i;
      MirrorHeader header = HeaderOf(MirrorKind::kResults, home);
      header.server = server;
      header.seq = guest.home_seq;
      header.state = static_cast<int32_t>(done & 1);
      header.num_pairs = header.state != 0 ? 0 : count;
      MirrorWriter writer(frame, header);
      const int64_t hidden = shape_.hidden_size;
      writer.Put(segment_->results() + (int64_t{home} * segment_->max_pairs() + begin) * hidden,
                 header.num_pairs * hidden);
      return writer.num_bytes();
    }
  }
  return 0;
}

// Whether ranks of the host have yet to run pairs of a rank's job.
bool ExpertMirror::IsAsked(int32_t home, int32_t host) const {
  const ExpertJob& job = segment_->job(home);
  const uint64_t seq = job.seq.load(std::memory_order_acquire);
  for (int32_t r = first(host); r < first(host + 1); ++r) {
    if (job.done[r].word.load(std::memory_order_acquire) / 2 >= seq) continue;
    if (segment_->rank(r).State() != ExpertRankState::kGone) return true;
  }
  return false;
}

int64_t ExpertMirror::CollectJob(int32_t host, char* frame) {
  for (int32_t i = 0; i < per_host_; ++i) {
    const int32_t home = first(host_) + i;
    const ExpertJob& job = segment_->job(home);
    const uint64_t seq = job.seq.load(std::memory_order_seq_cst);
    if (seq == peers_[host].sent[i] || !IsAsked(home, host)) continue;
    peers_[host].sent[i] = seq;
    const int32_t begin = job.first_pair[first(host)];
    MirrorHeader header = HeaderOf(MirrorKind::kJob, home);
    header.layer = job.layer;
    header.seq = seq;
    header.num_pairs = job.first_pair[first(host + 1)] - begin;
    std::fill(row_of_.begin(), row_of_.end(), -1);
    MirrorWriter writer(frame, header);
    for (int32_t r = first(host); r <= first(host + 1); ++r) writer.Put(job.first_pair[r] - begin);
    const ExpertPair* const pairs = segment_->pairs(home) + begin;
    for (int32_t p = 0; p < header.num_pairs; ++p) {
      int32_t& row = row_of_[pairs[p].row];
      if (row < 0) row = header.num_rows++;
      writer.Put(ExpertPair{row, pairs[p].slot, pairs[p].expert});
    }
    char* const rows = writer.Take(header.num_rows * int64_t{shape_.row_bytes});
    for (int32_t row = 0; row < job.num_rows; ++row) {
      const char* const from = segment_->rows() + (int64_t{home} * segment_->capacity() + row) * shape_.row_bytes;
      if (row_of_[row] >= 0) std::memcpy(rows + int64_t{row_of_[row]} * shape_.row_bytes, from, shape_.row_bytes);
    }
    writer.SetHeader(header);
    return writer.num_bytes();
  }
  return 0;
}

}  // namespace fdsd
