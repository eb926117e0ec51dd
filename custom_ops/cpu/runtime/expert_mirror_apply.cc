// What a host is told by others.
#include <algorithm>
#include <cstring>

#include "expert_mirror.h"
#include "expert_mirror_frame.h"

namespace fdsd {
namespace {

// An expert of a table, plus 1; 0 = none, also for what is no expert.
int32_t ExpertOf(const ExpertServiceShape& shape, const char* experts, int64_t i) {
  const auto expert = MirrorValue<int32_t>(experts, i);
  return expert >= 0 && expert <= shape.num_experts ? expert : 0;
}

}  // namespace

Error ExpertMirror::Check(int32_t host, const MirrorHeader& h, int64_t num_bytes) const {
  if (h.magic != kMirrorMagic) return "frame: expected one of experts, got another";
  if (h.version != kMirrorVersion) return "frame: expected this version, got another";
  if (std::memcmp(&h.shape, &shape_, sizeof(shape_)) != 0) return "frame: expected this model's shape, got another";
  if (h.num_rows < 0 || h.num_rows > segment_->capacity()) return "frame: expected as many rows as fit, got more";
  if (h.num_pairs < 0 || h.num_pairs > segment_->max_pairs()) return "frame: expected as many pairs as fit, got more";
  const int64_t body = MirrorBodyBytes(shape_, per_host_, h.kind, h.num_rows, h.num_pairs);
  if (body < 0) return "frame: expected a known kind, got another";
  if (num_bytes != static_cast<int64_t>(sizeof(h)) + body) return "frame: expected its length, got another";
  if (h.layer < 0 || h.layer >= shape_.num_layers) return "frame: expected a layer of the model, got another";
  const bool is_results = h.kind == MirrorKind::kResults;
  const int32_t theirs = is_results ? h.server : h.rank;
  if (!IsOf(theirs, host) || (is_results && !IsOf(h.rank, host_)))
    return "frame: expected its host's rank, got another";
  if (h.kind == MirrorKind::kTarget && host != 0) return "frame: expected targets of the first host, got another's";
  if (h.kind == MirrorKind::kRank && (h.state < 0 || h.state > static_cast<int32_t>(ExpertRankState::kGone)))
    return "frame: expected a state of a rank, got another number";
  return nullptr;
}

Error ExpertMirror::CheckJob(const MirrorHeader& h, const char* body) const {
  if (h.seq == 0) return "frame: expected the number of a job, got 0";
  int32_t before = 0;
  for (int32_t i = 0; i <= per_host_; ++i) {
    const int32_t pair = MirrorValue<int32_t>(body, i);
    if (pair < before || (i == 0 && pair != 0) || (i == per_host_ && pair != h.num_pairs))
      return "frame: expected pairs in the order of ranks, got others";
    before = pair;
  }
  for (int32_t i = 0; i < h.num_pairs; ++i) {
    const auto pair = MirrorValue<ExpertPair>(body + 4 * (per_host_ + 1), i);
    if (pair.row < 0 || pair.row >= h.num_rows || pair.slot < 0 || pair.slot >= shape_.num_slots || pair.expert < 0 ||
        pair.expert >= shape_.num_experts)
      return "frame: expected pairs of its rows and the model's slots and experts, got others";
  }
  return nullptr;
}

Error ExpertMirror::Apply(int32_t host, const char* frame, int64_t num_bytes) {
  if (num_bytes < static_cast<int64_t>(sizeof(MirrorHeader))) return "frame: expected a header, got less";
  const auto header = MirrorValue<MirrorHeader>(frame, 0);
  const char* const body = frame + sizeof(MirrorHeader);
  if (const Error error = Check(host, header, num_bytes)) return error;
  if (!peers_[host].is_connected) return "frame: expected one of a connected host, got another's";
  ExpertRank& rank = segment_->rank(header.rank);
  switch (header.kind) {
    case MirrorKind::kRank:
      rank.incarnation.store(header.incarnation, std::memory_order_release);
      rank.SetState(static_cast<ExpertRankState>(header.state));
      break;
    case MirrorKind::kSlots:
      WriteSlots(host, body);
      break;
    case MirrorKind::kTarget:
      WriteTarget(header.layer, body);
      break;
    case MirrorKind::kCounts:
      WriteCounts(header.rank, body);
      break;
    case MirrorKind::kJob:
      if (const Error error = CheckJob(header, body)) return error;
      guests_[header.rank].next.assign(frame, frame + num_bytes);
      guests_[header.rank].home_seq = 0;
      TakeNext(header.rank);
      break;
    case MirrorKind::kResults:
      WriteResults(header, body);
      break;
  }
  return nullptr;
}

// The table has a new version after all slots of the host.
void ExpertMirror::WriteSlots(int32_t host, const char* body) {
  const int32_t count = per_host_ * shape_.num_slots;
  for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
    std::atomic<int32_t>* const slots = segment_->slots(layer) + first(host) * shape_.num_slots;
    for (int32_t s = 0; s < count; ++s)
      slots[s].store(ExpertOf(shape_, body, int64_t{layer} * count + s), std::memory_order_seq_cst);
  }
  segment_->version().fetch_add(1, std::memory_order_seq_cst);
}

void ExpertMirror::WriteCounts(int32_t rank, const char* body) {
  const int32_t count = shape_.num_layers * shape_.num_experts;
  for (int32_t i = 0; i < count; ++i)
    segment_->counts(rank, 0)[i].store(MirrorValue<int64_t>(body, i), std::memory_order_relaxed);
  for (int32_t layer = 0; layer < shape_.num_layers; ++layer)
    segment_->served(rank)[layer].store(MirrorValue<int64_t>(body, int64_t{count} + layer), std::memory_order_relaxed);
}

void ExpertMirror::WriteTarget(int32_t layer, const char* body) {
  std::atomic<int32_t>* const target = segment_->target(layer);
  const int32_t before = target[0].load() | 1;
  target[0].store(before);
  for (int32_t s = 0; s < shape_.num_ranks * shape_.num_slots; ++s) target[1 + s].store(ExpertOf(shape_, body, s));
  target[0].store(before + 1);
}

// Write the job of another host's rank that waits for the last one, if this is over.
void ExpertMirror::TakeNext(int32_t rank) {
  Guest& guest = guests_[rank];
  if (guest.next.empty() || !segment_->IsOver(rank)) return;
  const auto header = MirrorValue<MirrorHeader>(guest.next.data(), 0);
  WriteJob(header, guest.next.data() + sizeof(MirrorHeader));
  guest.home_seq = header.seq;
  guest.answered = 0;
  guest.next.clear();
}

void ExpertMirror::WriteJob(const MirrorHeader& header, const char* body) {
  ExpertJob& job = segment_->job(header.rank);
  segment_->BeginJob(header.rank);
  job.layer = header.layer;
  job.num_rows = header.num_rows;
  const int32_t begin = first(host_);
  for (int32_t r = 0; r <= shape_.num_ranks; ++r)
    job.first_pair[r] = MirrorValue<int32_t>(body, std::clamp(r - begin, 0, per_host_));
  const char* const pairs = body + int64_t{4} * (per_host_ + 1);
  const int64_t pair_bytes = header.num_pairs * static_cast<int64_t>(sizeof(ExpertPair));
  std::memcpy(segment_->pairs(header.rank), pairs, static_cast<size_t>(pair_bytes));
  const int64_t row_bytes = shape_.row_bytes;
  std::memcpy(segment_->rows() + int64_t{header.rank} * segment_->capacity() * row_bytes, pairs + pair_bytes,
              static_cast<size_t>(header.num_rows * row_bytes));
  segment_->PublishJob(header.rank);
}

// Results of a job that is over by now are of no concern.
void ExpertMirror::WriteResults(const MirrorHeader& header, const char* body) {
  ExpertJob& job = segment_->job(header.rank);
  std::atomic<uint64_t>& done = job.done[header.server].word;
  if (header.seq != job.seq.load(std::memory_order_acquire) || done.load(std::memory_order_acquire) / 2 >= header.seq)
    return;
  const int32_t begin = job.first_pair[header.server];
  const bool is_whole = header.num_pairs == job.first_pair[header.server + 1] - begin && header.state == 0;
  const int64_t hidden = shape_.hidden_size;
  if (is_whole)
    std::memcpy(segment_->results() + (int64_t{header.rank} * segment_->max_pairs() + begin) * hidden, body,
                static_cast<size_t>(4 * header.num_pairs * hidden));
  done.store(2 * header.seq + !is_whole, std::memory_order_seq_cst);
  segment_->Wake(header.rank, kCallerAsleep);
}

}  // namespace fdsd
