// What is served, and in which order.
#include "expert_server.h"

#include <algorithm>

#include "shared_wait.h"

namespace fdsd {
namespace {

constexpr int32_t kNoJob = -1;
// How long a job waits at most for others of its layer: about as long as running it takes, but no longer than this.
constexpr int64_t kMaxGatherNs = 20'000'000;

int64_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

RunExpertsParams EmptyRun(const ExpertShape& shape) {
  RunExpertsParams p{};
  p.shape = shape;
  return p;
}

}  // namespace

ExpertServer::ExpertServer(const ExpertSegment& segment, int32_t rank)
    : segment_(segment),
      rank_(rank),
      own_(segment.rank(rank)),
      layers_(static_cast<size_t>(segment.shape().num_layers)),
      seen_(static_cast<size_t>(segment.shape().num_ranks)),
      first_pair_(static_cast<size_t>(segment.shape().num_slots) + 1),
      next_pair_(static_cast<size_t>(segment.shape().num_slots)),
      x_rows_(static_cast<size_t>(segment.max_pairs()) * seen_.size()),
      y_rows_(x_rows_.size()) {
  taken_.reserve(seen_.size());
}

Error ExpertServer::AddLayer(const ExpertServiceLayerParams& p) {
  const ExpertServiceShape& s = segment_.shape();
  if (p.layer < 0 || p.layer >= s.num_layers) return "layer: expected one of the shape's, got another";
  if (p.num_experts < 1 || p.num_experts > s.num_experts) return "num_experts: expected 1 to the shape's, got another";
  if (p.top_k < 1 || p.top_k > std::min(s.top_k, p.num_experts)) return "top_k: expected 1 to the shape's, got another";
  if (const Error error = CheckLayer(p)) return error;
  if (p.shape.hidden_size > s.hidden_size || p.shape.hidden_size * ElementBytes(p.shape.dtype) > s.row_bytes)
    return "hidden_size: expected rows within the shape's, got longer ones";
  std::lock_guard<std::mutex> lock(mutex_);
  Layer& layer = layers_[p.layer];
  layer.params = p;
  layer.weights.assign(static_cast<size_t>(s.num_slots), {});
  layer.experts.assign(static_cast<size_t>(s.num_slots), -1);
  return nullptr;
}

// Whether what runs the experts can run these.
Error ExpertServer::CheckLayer(const ExpertServiceLayerParams& p) const {
  return runner_ == nullptr ? RunExperts(EmptyRun(p.shape)) : runner_->add_layer(runner_->self, p);
}

Error ExpertServer::FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const {
  if (layer < 0 || layer >= segment_.shape().num_layers || layers_[layer].params.num_experts == 0)
    return "layer: expected a layer of the service, got another";
  *found = &layers_[layer].params;
  return nullptr;
}

Error ExpertServer::SetSlot(int32_t layer, int32_t slot, int32_t expert, const ExpertWeights& weights) {
  const ExpertServiceLayerParams* known = nullptr;
  if (const Error error = FindLayer(layer, &known)) return error;
  if (slot < 0 || slot >= segment_.shape().num_slots) return "slot: expected one of the rank's, got another";
  if (expert < -1 || expert >= known->num_experts) return "expert: expected one of the layer's or -1, got another";
  for (const void* packed : {weights.gate_up, weights.down})
    if (expert >= 0 && (packed == nullptr || reinterpret_cast<uintptr_t>(packed) % 64 != 0))
      return "weights: expected addresses that are multiples of 64, got another";
  std::lock_guard<std::mutex> lock(mutex_);
  layers_[layer].experts[slot] = expert;
  layers_[layer].weights[slot] = weights;
  return nullptr;
}

Error ExpertServer::FindSlot(int32_t layer, int32_t slot, int32_t* expert) {
  const ExpertServiceLayerParams* known = nullptr;
  if (const Error error = FindLayer(layer, &known)) return error;
  if (slot < 0 || slot >= segment_.shape().num_slots) return "slot: expected one of the rank's, got another";
  std::lock_guard<std::mutex> lock(mutex_);
  *expert = layers_[layer].experts[slot];
  return nullptr;
}

// Whether the rank's job has pairs for this one that have not been run.
bool ExpertServer::IsWaiting(int32_t rank) const {
  const ExpertJob& job = segment_.job(rank);
  const uint64_t seq = job.seq.load(std::memory_order_seq_cst);
  return job.done[rank_].word.load(std::memory_order_acquire) / 2 < seq;
}

bool ExpertServer::HasJobs() const {
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r)
    if (IsWaiting(r)) return true;
  return false;
}

void ExpertServer::Look() {
  const int64_t now = MonotonicNs();
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r) {
    Seen& seen = seen_[r];
    seen.is_waiting = IsWaiting(r);
    const uint64_t seq = segment_.job(r).seq.load(std::memory_order_relaxed);
    if (seen.is_waiting && seen.seq != seq) seen = {seq, now, true};
  }
}

// Whether no rank will still give rows to the layer in its pass, or the jobs have waited long enough for that.
bool ExpertServer::IsGathered(int32_t layer, int64_t wait) const {
  if (wait >= std::clamp(layers_[layer].last_run, kMinGatherNs, kMaxGatherNs)) return true;
  // Within a pass the thread that computes it serves as soon as it waits itself: another one would take its core.
  if (own_.next_layer.load(std::memory_order_relaxed) > 0 && !is_caller_serving_.load(std::memory_order_relaxed))
    return false;
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r) {
    const ExpertRank& other = segment_.rank(r);
    if (other.State() != ExpertRankState::kServing) continue;
    const int32_t next = other.next_layer.load(std::memory_order_acquire) - 1;
    if (next < 0 || next > layer) continue;
    if (!IsWaiting(r) || segment_.job(r).layer != layer) return false;
  }
  return true;
}

// The layer of the job that has waited longest, of those that need not wait. kNoJob: `later` is how long they wait at
// most.
int32_t ExpertServer::ChooseJob(int64_t* later) {
  Look();
  const int64_t now = MonotonicNs();
  const Seen* best = nullptr;
  int32_t best_layer = kNoJob;
  *later = 0;
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r) {
    if (!seen_[r].is_waiting) continue;
    const int32_t layer = segment_.job(r).layer;
    if (layer < 0 || layer >= segment_.shape().num_layers) {
      segment_.job(r).done[rank_].word.store(2 * seen_[r].seq + 1, std::memory_order_seq_cst);
      continue;
    }
    if (!IsGathered(layer, now - seen_[r].since)) {
      *later = kMinGatherNs;
    } else if (best == nullptr || seen_[r].since < best->since) {
      best = &seen_[r];
      best_layer = layer;
    }
  }
  return best_layer;
}

// Whether this rank has what the pairs of a rank's job ask for.
bool ExpertServer::CanTake(const Layer& layer, int32_t rank) const {
  const ExpertJob& job = segment_.job(rank);
  const int32_t begin = job.first_pair[rank_];
  const int32_t end = job.first_pair[rank_ + 1];
  if (begin < 0 || end < begin || end > segment_.max_pairs() || layer.experts.empty()) return false;
  if (runner_ != nullptr && !runner_->reaches(runner_->self, rank)) return false;
  for (const ExpertPair* pair = segment_.pairs(rank) + begin; pair < segment_.pairs(rank) + end; ++pair) {
    if (pair->slot < 0 || pair->slot >= segment_.shape().num_slots || pair->expert < 0) return false;
    if (layer.experts[pair->slot] != pair->expert) return false;
    if (pair->row < 0 || pair->row >= segment_.capacity()) return false;
  }
  return true;
}

// Put the pairs of all jobs of a layer together, by slot. Returns how many there are.
int32_t ExpertServer::TakeJobs(int32_t layer_index) {
  const Layer& layer = layers_[layer_index];
  taken_.clear();
  std::fill(next_pair_.begin(), next_pair_.end(), 0);
  const auto for_each_pair = [this](int32_t rank, auto&& body) {
    const ExpertJob& job = segment_.job(rank);
    for (int32_t i = job.first_pair[rank_]; i < job.first_pair[rank_ + 1]; ++i) body(i, segment_.pairs(rank)[i]);
  };
  for (int32_t r = 0; r < segment_.shape().num_ranks; ++r) {
    if (!seen_[r].is_waiting || segment_.job(r).layer != layer_index) continue;
    const Taken taken{r, seen_[r].seq, !CanTake(layer, r)};
    taken_.push_back(taken);
    if (!taken.is_refused) for_each_pair(r, [this](int32_t, const ExpertPair& pair) { ++next_pair_[pair.slot]; });
  }
  first_pair_[0] = 0;
  for (size_t s = 0; s < next_pair_.size(); ++s) {
    first_pair_[s + 1] = first_pair_[s] + next_pair_[s];
    next_pair_[s] = first_pair_[s];
  }
  for (const Taken& taken : taken_) {
    if (taken.is_refused) continue;
    for_each_pair(taken.rank, [&](int32_t i, const ExpertPair& pair) {
      const int32_t place = next_pair_[pair.slot]++;
      x_rows_[place] = taken.rank * segment_.capacity() + pair.row;
      y_rows_[place] = taken.rank * segment_.max_pairs() + i;
    });
  }
  return first_pair_.back();
}

Error ExpertServer::RunPairs(const Layer& layer, int32_t num_pairs) {
  RunExpertsParams p = EmptyRun(layer.params.shape);
  p.num_experts = segment_.shape().num_slots;
  p.rows_per_expert = num_pairs / p.num_experts;
  p.experts = layer.weights.data();
  p.first_pair = first_pair_.data();
  p.x_rows = x_rows_.data();
  p.x_stride = segment_.shape().row_bytes / ElementBytes(p.shape.dtype);
  p.y_rows = y_rows_.data();
  p.y_stride = segment_.shape().hidden_size;
  if (runner_ != nullptr) return runner_->run(runner_->self, p);
  p.x = segment_.rows();
  p.y = segment_.results();
  return RunExperts(p);
}

void ExpertServer::RunJobs(int32_t layer_index) {
  const int64_t begin = MonotonicNs();
  const int32_t num_pairs = TakeJobs(layer_index);
  Layer& layer = layers_[layer_index];
  Error error = nullptr;
  if (num_pairs > 0) {
    error = RunPairs(layer, num_pairs);
    std::atomic<int64_t>& served = segment_.served(rank_)[layer_index];
    if (error == nullptr) served.store(served.load(std::memory_order_relaxed) + num_pairs, std::memory_order_relaxed);
  }
  for (const Taken& taken : taken_) {
    const bool is_refused = taken.is_refused || error != nullptr;
    segment_.job(taken.rank).done[rank_].word.store(2 * taken.seq + is_refused, std::memory_order_seq_cst);
    segment_.Wake(taken.rank, kCallerAsleep);
  }
  layer.last_run = MonotonicNs() - begin;
}

ExpertServer::Served ExpertServer::TryServe(int64_t* later) {
  Served served = Served::kJobs;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return Served::kBusy;
    is_busy_.store(true, std::memory_order_seq_cst);
    const int32_t layer = ChooseJob(later);
    if (layer != kNoJob) {
      RunJobs(layer);
    } else {
      served = *later > 0 ? Served::kLater : Served::kNothing;
    }
    is_busy_.store(false, std::memory_order_seq_cst);
  }
  // In one order with `asleep`: either a caller that goes to sleep sees that none serves, or it is seen asleep.
  segment_.Wake(rank_, kCallerAsleep);
  return served;
}

}  // namespace fdsd
