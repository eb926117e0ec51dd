#include "expert_home.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "communicator.h"
#include "parallel_ranges.h"
#include "shared_wait.h"

namespace fdsd {
namespace {

// Another rank that ended its pass is expected to begin the next one within twice the time that this took it before.
constexpr int64_t kMaxGapNs = 20'000'000;
// How long a rank sleeps at most that waits for others to begin a pass: they do not wake it.
constexpr int64_t kPassNapNs = 200'000;
constexpr Error kNotPublished = "expert_ids: expected experts that a rank has published, got another";
// What one thread copies; below it another one would cost more to call than it saves.
constexpr int64_t kCopyBytes = 64 << 10;

void Copy(const char* from, int64_t num_bytes, char* to) {
  ParallelRanges(num_bytes, kCopyBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace

ExpertHome::ExpertHome(const ExpertSegment& segment, ExpertServer* server, int32_t rank, double timeout_s)
    : segment_(segment),
      server_(*server),
      rank_(rank),
      timeout_(static_cast<int64_t>(timeout_s * 1e9)),
      job_(segment.job(rank)),
      results_(segment.results() + int64_t{rank} * segment.max_pairs() * segment.shape().hidden_size),
      pass_times_(static_cast<size_t>(segment.shape().num_layers)),
      passes_seen_(static_cast<size_t>(segment.shape().num_ranks)),
      replicas_(pass_times_.size()),
      slot_of_(static_cast<size_t>(segment.max_pairs())),
      pair_of_(slot_of_.size()),
      next_pair_(passes_seen_.size() * static_cast<size_t>(segment.shape().num_slots)) {}

// Whether a rank, which had begun so many passes before, is expected to begin another one soon.
bool ExpertHome::IsAwaited(int32_t rank, int64_t pass_before, int32_t layer) const {
  const ExpertRank& other = segment_.rank(rank);
  if (rank == rank_ || other.State() != ExpertRankState::kServing) return false;
  if (other.pass.load(std::memory_order_acquire) != pass_before) return false;
  const int32_t next = other.next_layer.load(std::memory_order_acquire);
  if (next != 0) return next > layer + 2;  // one that waits as well does not come
  const int64_t end = other.pass_end.load(std::memory_order_acquire);
  return end != 0 && MonotonicNs() < end + 2 * other.pass_gap.load(std::memory_order_relaxed);
}

Error ExpertHome::BeginPass(int32_t layer) {
  const int32_t num_ranks = segment_.shape().num_ranks;
  ExpertRank& own = segment_.rank(rank_);
  const int64_t end = own.pass_end.load(std::memory_order_relaxed);
  if (end != 0) own.pass_gap.store(std::min(MonotonicNs() - end, kMaxGapNs), std::memory_order_relaxed);
  for (int32_t r = 0; r < num_ranks; ++r) passes_seen_[r] = segment_.rank(r).pass.load(std::memory_order_acquire);
  own.next_layer.store(-(layer + 1), std::memory_order_release);
  int64_t left = pass_times_[layer] / 2;
  server_.ServeUntil(&left, kPassNapNs, [&] {
    for (int32_t r = 0; r < num_ranks; ++r)
      if (IsAwaited(r, passes_seen_[r], layer)) return false;
    return true;
  });
  if (server_.is_aborted()) return Failure();
  first_layer_ = layer;
  pass_begin_ = MonotonicNs();
  own.next_layer.store(layer + 1, std::memory_order_release);
  own.pass.fetch_add(1, std::memory_order_acq_rel);
  return nullptr;
}

void ExpertHome::EndPass() {
  ExpertRank& own = segment_.rank(rank_);
  const int64_t now = MonotonicNs();
  if (pass_begin_ != 0) pass_times_[first_layer_] = now - pass_begin_;
  pass_begin_ = 0;
  own.pass_end.store(now, std::memory_order_release);
  own.next_layer.store(0, std::memory_order_release);
}

void ExpertHome::LeaveLayer(int32_t layer) {
  ExpertRank& own = segment_.rank(rank_);
  if (own.next_layer.load(std::memory_order_relaxed) != 0) own.next_layer.store(layer + 2, std::memory_order_release);
}

// Whether a rank that has still to do the job is being started (again), which takes as long as it takes.
bool ExpertHome::AwaitsLoading() const {
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r)
    if (job_.IsAwaited(r) && segment_.rank(r).State() == ExpertRankState::kLoading) return true;
  return false;
}

// The rank that a drain does not wait for although it has still to do the job, -1 = none.
int32_t ExpertHome::FindGivenUp() const {
  if (segment_.rank(rank_).is_draining.load(std::memory_order_relaxed) == 0) return -1;
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r)
    if (job_.IsAwaited(r) && segment_.LiveState(r) == ExpertRankState::kLoading) return r;
  return -1;
}

// Serve until the job is over; returns false where that does not come about, or not in time.
bool ExpertHome::ServeUntilOver() {
  const auto may_go_on = [this] { return segment_.IsOver(rank_) || FindGivenUp() >= 0; };
  for (;;) {
    int64_t left = timeout_;
    if (server_.ServeUntil(&left, kNapNanoseconds, may_go_on)) return segment_.IsOver(rank_);
    if (server_.is_aborted() || !AwaitsLoading()) return false;
  }
}

bool ExpertHome::MustRepeat() const {
  const uint64_t seq = job_.seq.load(std::memory_order_relaxed);
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r)
    if (job_.done[r].word.load(std::memory_order_acquire) != 2 * seq) return true;
  return false;
}

Error ExpertHome::Failure() {
  // The pass is over: no rank shall wait for its rows.
  segment_.rank(rank_).next_layer.store(0, std::memory_order_release);
  is_lost_.store(true, std::memory_order_relaxed);
  if (server_.is_aborted()) return "the expert service was aborted";
  if (const int32_t r = FindGivenUp(); r >= 0) return RankError(r, "is lost, and a drain does not wait for it");
  const uint64_t seq = job_.seq.load(std::memory_order_relaxed);
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r)
    if (job_.done[r].word.load(std::memory_order_acquire) / 2 < seq)
      return RankError(r, "did not run its experts in time");
  return RankError(rank_, "asked in vain for experts that others have moved meanwhile");
}

const ExpertHome::Replicas& ExpertHome::ReadTable(int32_t layer, int32_t num_experts) {
  std::atomic<uint64_t>& version = segment_.version();
  Replicas& found = replicas_[layer];
  const int32_t num_slots = static_cast<int32_t>(next_pair_.size());
  for (uint64_t seen = version.load(std::memory_order_seq_cst);; seen = version.load(std::memory_order_seq_cst)) {
    // Who waits for jobs of older tables has raised the version before it looks: it sees this, or this sees that.
    job_.version.store(seen + 1, std::memory_order_seq_cst);
    if (version.load(std::memory_order_seq_cst) != seen) continue;
    if (found.version == seen + 1) return found;
    std::vector<std::pair<int32_t, int32_t>> placed;
    for (int32_t s = 0; s < num_slots; ++s) {
      const int32_t expert = segment_.slots(layer)[s].load(std::memory_order_acquire) - 1;
      if (expert >= 0 && expert < num_experts) placed.emplace_back(expert, s);
    }
    std::sort(placed.begin(), placed.end());
    found.slots.clear();
    found.first.assign(static_cast<size_t>(num_experts) + 1, 0);
    for (const auto& [expert, slot] : placed) {
      found.slots.push_back(slot);
      ++found.first[expert + 1];
    }
    for (int32_t e = 0; e < num_experts; ++e) found.first[e + 1] += found.first[e];
    if (version.load(std::memory_order_seq_cst) != seen) continue;
    found.version = seen + 1;
    return found;
  }
}

// The own rank's slot if it has one, else one of the others that will come, by row.
Error ExpertHome::ChooseSlot(const Replicas& replicas, int32_t expert, int64_t row, int32_t* slot) {
  if (expert < 0 || expert + 1 >= static_cast<int32_t>(replicas.first.size()))
    return "expert_ids: expected experts of the layer, got another";
  const int32_t num_slots = segment_.shape().num_slots;
  const int32_t first = replicas.first[expert];
  const int32_t count = replicas.first[expert + 1] - first;
  if (count == 0) return kNotPublished;
  for (int32_t i = 0; i < count; ++i) {
    if (replicas.slots[first + i] / num_slots != rank_) continue;
    *slot = replicas.slots[first + i];
    return nullptr;
  }
  // A rank that is started again will come: it is taken where no other has the expert.
  for (const bool must_serve : {true, false}) {
    for (int32_t i = 0; i < count; ++i) {
      *slot = replicas.slots[first + static_cast<int32_t>((row + rank_ + i) % count)];
      const ExpertRankState state = segment_.rank(*slot / num_slots).State();
      if (state == ExpertRankState::kServing || state == ExpertRankState::kLeaving) return nullptr;
      if (state != ExpertRankState::kGone && !must_serve) return nullptr;
    }
  }
  is_lost_.store(true, std::memory_order_relaxed);
  return RankError(*slot / num_slots, "has ended, and no other has its experts");
}

// Place the pairs by rank, then slot, then row.
Error ExpertHome::SortPairs(const Replicas& replicas) {
  const int32_t num_pairs = rows_.num_rows * top_k_;
  const int32_t num_slots = segment_.shape().num_slots;
  std::fill(next_pair_.begin(), next_pair_.end(), 0);
  for (int32_t i = 0; i < num_pairs; ++i) {
    const Error error = ChooseSlot(replicas, rows_.expert_ids[i], i / top_k_, &slot_of_[i]);
    if (error != nullptr) return error;
    ++next_pair_[slot_of_[i]];
  }
  int32_t first = 0;
  for (size_t s = 0; s < next_pair_.size(); ++s) {
    if (s % static_cast<size_t>(num_slots) == 0) job_.first_pair[s / static_cast<size_t>(num_slots)] = first;
    const int32_t count = next_pair_[s];
    next_pair_[s] = first;
    first += count;
  }
  job_.first_pair[segment_.shape().num_ranks] = first;
  ExpertPair* const pairs = segment_.pairs(rank_);
  for (int32_t i = 0; i < num_pairs; ++i) {
    const int32_t pair = next_pair_[slot_of_[i]]++;
    pairs[pair] = {i / top_k_, slot_of_[i] % num_slots, rows_.expert_ids[i]};
    pair_of_[i] = pair;
  }
  return nullptr;
}

Error ExpertHome::Publish() {
  const ExpertServiceLayerParams* layer = nullptr;
  if (const Error error = server_.FindLayer(rows_.layer, &layer)) return error;
  segment_.BeginJob(rank_);
  for (int64_t left = timeout_;;) {
    const Replicas& replicas = ReadTable(rows_.layer, layer->num_experts);
    const Error error = SortPairs(replicas);
    if (error == nullptr) break;
    // An expert that moves between other hosts may be in neither place until this one has heard of both.
    job_.version.store(0, std::memory_order_release);
    const auto has_changed = [&] { return segment_.version().load(std::memory_order_seq_cst) + 1 != replicas.version; };
    if (error != kNotPublished || !server_.ServeUntil(&left, kPassNapNs, has_changed)) return error;
  }
  job_.layer = rows_.layer;
  job_.num_rows = rows_.num_rows;
  segment_.PublishJob(rank_);
  return nullptr;
}

void ExpertHome::Count() {
  std::atomic<int64_t>* const counts = segment_.counts(rank_, rows_.layer);
  for (int32_t i = 0; i < rows_.num_rows * top_k_; ++i) {
    std::atomic<int64_t>& count = counts[rows_.expert_ids[i]];
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

Error ExpertHome::Post(const ExpertRows& rows) {
  is_lost_.store(false, std::memory_order_relaxed);
  if (!ServeUntilOver()) return Failure();
  is_posted_ = false;
  if (rows.num_rows == 0) return nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (const Error error = server_.FindLayer(rows.layer, &layer)) return error;
  rows_ = rows;
  top_k_ = layer->top_k;
  const int64_t stride = segment_.shape().row_bytes;
  char* const to = segment_.rows() + int64_t{rank_} * segment_.capacity() * stride;
  if (stride == rows.row_bytes) {
    Copy(rows.x, rows.num_rows * stride, to);
  } else {
    for (int64_t i = 0; i < rows.num_rows; ++i) Copy(rows.x + i * rows.row_bytes, rows.row_bytes, to + i * stride);
  }
  if (const Error error = Publish()) return error;
  Count();
  is_posted_ = true;
  return nullptr;
}

Error ExpertHome::Await(int32_t layer, int32_t num_rows) {
  if (!is_posted_ || rows_.layer != layer || rows_.num_rows != num_rows)
    return "x: expected the rows that dispatch_experts has just had of this layer, got others";
  for (;;) {
    if (!ServeUntilOver()) return Failure();
    if (!MustRepeat()) break;
    if (const Error error = Publish()) return error;
  }
  job_.version.store(0, std::memory_order_release);
  is_posted_ = false;
  return nullptr;
}

}  // namespace fdsd
