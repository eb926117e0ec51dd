#include "expert_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <string>

#include "shared_wait.h"

namespace fdsd {
namespace {

// Raised with every change of what the segment holds.
constexpr int32_t kLayoutVersion = 7;
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMaxResultBytes = 64 << 20;
constexpr int kNumAgreed = 9;

// Zeros at first.
struct Header {
  std::atomic<int32_t> agreed[kNumAgreed];
  alignas(64) std::atomic<uint64_t> version;
};
static_assert(std::atomic<int32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

struct flock LockOf(int32_t rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

int32_t ExpertSegment::CapacityOf(const ExpertServiceShape& s) {
  const int64_t row_bytes = int64_t{4} * s.hidden_size * s.top_k;
  return static_cast<int32_t>(std::clamp<int64_t>(kMaxResultBytes / row_bytes, 1, s.max_tokens));
}

Error ExpertSegment::Check(const ExpertServiceShape& s) {
  if (s.num_ranks < 1 || s.num_ranks > kMaxExpertRanks) return "num_ranks: expected 1 to 64, got another number";
  for (const int32_t size : {s.num_layers, s.num_experts, s.num_slots, s.top_k, s.hidden_size, s.max_tokens})
    if (size < 1 || size > 1 << 24) return "shape: expected sizes of 1 to 2^24, got another";
  if (s.top_k > s.num_experts) return "top_k: expected at most num_experts, got more";
  if (s.row_bytes < 4 || s.row_bytes % 4 != 0) return "row_bytes: expected a multiple of 4, got another number";
  if (int64_t{s.num_ranks} * CapacityOf(s) * s.top_k > std::numeric_limits<int32_t>::max())
    return "max_tokens: expected at most 2^31 - 1 pairs of all ranks, got more";
  return nullptr;
}

ExpertSegment::Offsets ExpertSegment::OffsetsOf(const ExpertServiceShape& s) {
  int64_t end = kPageBytes;
  const auto take = [&end](int64_t num_bytes) {
    const int64_t begin = end;
    end += (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    return begin;
  };
  const int64_t ranks = s.num_ranks;
  const int64_t rows = ranks * CapacityOf(s);
  Offsets o;
  o.ranks = take((ranks + 1) * static_cast<int64_t>(sizeof(ExpertRank)));
  o.jobs = take(ranks * static_cast<int64_t>(sizeof(ExpertJob)));
  o.slots = take(ranks * s.num_layers * s.num_slots * 4);
  o.targets = take(s.num_layers * (1 + ranks * s.num_slots) * 4);
  o.counts = take(ranks * s.num_layers * s.num_experts * 8);
  o.served = take(ranks * s.num_layers * 8);
  o.pairs = take(rows * s.top_k * static_cast<int64_t>(sizeof(ExpertPair)));
  o.rows = take(rows * s.row_bytes);
  o.results = take(rows * s.top_k * s.hidden_size * 4);
  o.end = end;
  return o;
}

int64_t ExpertSegment::NumBytes(const ExpertServiceShape& shape) { return OffsetsOf(shape).end; }

ExpertSegment::ExpertSegment(const ExpertServiceShape& shape, void* data, int32_t file)
    : shape_(shape),
      capacity_(CapacityOf(shape)),
      offsets_(OffsetsOf(shape)),
      data_(static_cast<char*>(data)),
      file_(file) {}

ExpertSegment::~ExpertSegment() {
  munmap(data_, static_cast<size_t>(offsets_.end));
  close(file_);
}

Error ExpertSegment::Claim(int32_t rank_index) {
  // The lock is that of the open file, so the kernel frees it when the process ends, however that ends.
  struct flock lock = LockOf(rank_index);
  if (fcntl(file_, F_OFD_SETLK, &lock) != 0) return "rank: expected one that no other process is, got another";
  own_rank_ = rank_index;
  return nullptr;
}

ExpertRankState ExpertSegment::LiveState(int32_t rank_index) const {
  const ExpertRank& one = rank(rank_index);
  const ExpertRankState state = one.State();
  if (state == ExpertRankState::kAbsent || state == ExpertRankState::kGone || rank_index == own_rank_) return state;
  if (one.is_elsewhere.load(std::memory_order_relaxed) != 0) return state;
  struct flock lock = LockOf(rank_index);
  const bool has_ended = fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  return has_ended ? ExpertRankState::kLoading : state;
}

std::atomic<uint64_t>& ExpertSegment::version() const { return At<Header>(0)->version; }

Error ExpertSegment::Agree() const {
  const ExpertServiceShape& s = shape_;
  const int32_t own[kNumAgreed] = {kLayoutVersion, s.num_ranks, s.num_layers,  s.num_experts, s.num_slots,
                                   s.top_k,        s.row_bytes, s.hidden_size, s.max_tokens};
  for (int i = 0; i < kNumAgreed; ++i) {
    int32_t known = 0;
    if (!At<Header>(0)->agreed[i].compare_exchange_strong(known, own[i]) && known != own[i])
      return "shape: expected that of the other ranks, got another";
  }
  return nullptr;
}

Error ExpertSegment::FindShape(int32_t file, ExpertServiceShape* shape) {
  int32_t agreed[kNumAgreed];
  if (pread(file, agreed, sizeof(agreed), 0) != sizeof(agreed) || std::count(agreed, agreed + kNumAgreed, 0) != 0)
    return "file: expected a segment that a rank has opened, got another file";
  if (agreed[0] != kLayoutVersion) return "file: expected a segment of this version, got another";
  *shape = {agreed[1], agreed[2], agreed[3], agreed[4], agreed[5], agreed[7], agreed[6], agreed[8]};
  return nullptr;
}

Error ExpertSegment::Open(int32_t file, const ExpertServiceShape& shape, std::unique_ptr<ExpertSegment>* segment) {
  if (const Error error = Check(shape)) return error;
  const int64_t num_bytes = NumBytes(shape);
  struct stat status;
  if (fstat(file, &status) != 0) return "file: expected the descriptor of a segment, got another number";
  if (status.st_size != 0 && status.st_size != num_bytes) return "shape: expected that of the other ranks, got another";
  if (status.st_size == 0 && ftruncate(file, num_bytes) != 0) return "file: expected a segment that can grow, got none";
  const int32_t own_file = open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_RDWR | O_CLOEXEC);
  if (own_file < 0) return "file: expected a segment that can be opened, got another";
  void* const data = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, own_file, 0);
  if (data == MAP_FAILED) {
    close(own_file);
    return "file: expected a segment that can be mapped, got another";
  }
  segment->reset(new ExpertSegment(shape, data, own_file));
  return (*segment)->Agree();
}

void ExpertSegment::Wake(int32_t rank_index, uint32_t threads) const {
  ExpertRank& one = rank(rank_index).is_elsewhere.load(std::memory_order_relaxed) != 0 ? mirror() : rank(rank_index);
  if ((one.asleep.load(std::memory_order_seq_cst) & threads) != 0) SharedWakeAll(&one.wake);
}

bool ExpertSegment::IsOver(int32_t rank_index) const {
  const ExpertJob& own = job(rank_index);
  const uint64_t seq = own.seq.load(std::memory_order_relaxed);
  for (int32_t r = 0; r < shape_.num_ranks; ++r) {
    if (own.done[r].word.load(std::memory_order_acquire) / 2 >= seq) continue;
    if (rank(r).State() != ExpertRankState::kGone) return false;
  }
  return true;
}

uint64_t ExpertSegment::BeginJob(int32_t rank_index) const {
  ExpertJob& own = job(rank_index);
  const uint64_t seq = own.seq.load(std::memory_order_relaxed);
  for (int32_t r = 0; r < shape_.num_ranks; ++r) own.done[r].word.store(2 * seq, std::memory_order_relaxed);
  return seq + 1;
}

void ExpertSegment::PublishJob(int32_t rank_index) const {
  ExpertJob& own = job(rank_index);
  const uint64_t seq = own.seq.load(std::memory_order_relaxed) + 1;
  const auto is_asked = [&](int32_t r) { return own.first_pair[r + 1] > own.first_pair[r]; };
  for (int32_t r = 0; r < shape_.num_ranks; ++r)
    if (!is_asked(r)) own.done[r].word.store(2 * seq, std::memory_order_relaxed);
  // In one order with `asleep`: either a rank that goes to sleep sees the job, or it is seen asleep.
  own.seq.store(seq, std::memory_order_seq_cst);
  for (int32_t r = 0; r < shape_.num_ranks; ++r)
    if (r != rank_index && is_asked(r)) Wake(r, kThreadAsleep | kCallerAsleep);
}

}  // namespace fdsd
