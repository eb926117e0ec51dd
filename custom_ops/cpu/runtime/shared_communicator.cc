// Ranks in processes of one host (or threads) that share memory.
//
// Each rank has two buffers and one line of the segment that only it writes: the number of its last exchange and the
// last attempt it failed in. It copies into a buffer, raises its number, and waits until the others' numbers have come
// as far. A buffer is free again one exchange later: a rank whose number is n has read everything of n - 1.
// A waiting rank first polls without pause, then lets others run between two polls, then sleeps until it is woken.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "communicator.h"
#include "shared_wait.h"
#include "thread_pool.h"

namespace fdsd {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kMinBufferBytes = 64;
// More would leave the caches of two cores between writing and reading.
constexpr int64_t kMaxBufferBytes = 256 << 10;
// What one thread copies; below it another one would cost more to call than it saves.
constexpr int64_t kCopyBytes = 64 << 10;

// What one rank tells the others. The first line changes with every exchange and is all that they look at.
struct alignas(kLineBytes) RankLine {
  std::atomic<uint64_t> progress;       // attempt << 32 | exchanges of it
  std::atomic<uint64_t> last_progress;  // when it began the attempt
  std::atomic<int64_t> num_bytes[2];    // most_bytes of the exchange in this buffer
  // What the others wake it by.
  alignas(kLineBytes) std::atomic<uint32_t> wake;
  std::atomic<uint32_t> is_asleep;
};

struct Header {
  alignas(kLineBytes) GroupFlags flags;
  alignas(kLineBytes) std::atomic<int32_t> size;  // of the group, set by the first rank that comes
  RankLine ranks[kMaxRanks];
};
static_assert(sizeof(Header) <= kHeaderBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

void Copy(const void* from, int64_t num_bytes, void* to) {
  ParallelFor((num_bytes + kCopyBytes - 1) / kCopyBytes, [&](int64_t i) {
    const int64_t begin = i * kCopyBytes;
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<size_t>(std::min(kCopyBytes, num_bytes - begin)));
  });
}

class SharedCommunicator final : public Communicator {
 public:
  SharedCommunicator(const SharedCommunicatorParams& p, void* segment, int64_t num_bytes, int64_t buffer_bytes)
      : Communicator(p.rank, p.size),
        header_(static_cast<Header*>(segment)),
        num_bytes_(num_bytes),
        buffer_bytes_(buffer_bytes),
        timeout_(static_cast<int64_t>(p.timeout_s * 1e9)) {}
  ~SharedCommunicator() override { munmap(header_, static_cast<size_t>(num_bytes_)); }

  int64_t max_bytes() const override { return buffer_bytes_; }

  Error Begin(int64_t attempt) override {
    if (attempt <= attempt_ || attempt > std::numeric_limits<int32_t>::max()) {
      return "attempt: expected a higher number than before, at most 2^31 - 1, got another";
    }
    own().last_progress.store(progress(), std::memory_order_relaxed);
    attempt_ = attempt;
    count_ = 0;
    Publish();
    return nullptr;
  }

  const GroupFlags* flags() const override { return &header_->flags; }

  void Fail() override {
    std::atomic_ref(header_->flags.failed_in[rank()]).store(static_cast<uint64_t>(attempt_) + 1);
    WakeOthers();
  }

  void Abort() override {
    std::atomic_ref(header_->flags.is_aborted).store(1);
    for (int32_t r = 0; r < size(); ++r) Wake(r);
  }

  Error Exchange(const void* mine, int64_t num_bytes, int64_t most_bytes, const void** parts) override {
    // The first buffers are free when all ranks have begun the attempt; the order of exchanges frees the later ones.
    if (count_ == 0) {
      if (const Error error = WaitForAll()) return error;
    } else if (const Error error = Failure()) {
      return error;
    }
    const int32_t buffer = static_cast<int32_t>(count_ % 2);
    Copy(mine, num_bytes, Buffer(rank(), buffer));
    own().num_bytes[buffer].store(most_bytes, std::memory_order_relaxed);
    ++count_;
    Publish();
    if (const Error error = WaitForAll()) return error;
    for (int32_t r = 0; r < size(); ++r) {
      if (header_->ranks[r].num_bytes[buffer].load(std::memory_order_relaxed) != most_bytes) {
        Fail();
        return RankError(r, "exchanges another number of bytes: expected the same ops on all ranks");
      }
      parts[r] = r == rank() ? mine : Buffer(r, buffer);
    }
    return nullptr;
  }

 private:
  RankLine& own() const { return header_->ranks[rank()]; }
  uint64_t progress() const { return static_cast<uint64_t>(attempt_) << 32 | count_; }

  char* Buffer(int32_t of_rank, int32_t index) const {
    return reinterpret_cast<char*>(header_) + kHeaderBytes + (of_rank * 2 + index) * buffer_bytes_;
  }

  void Publish() {
    // In one order with is_asleep: either a rank that goes to sleep sees it, or it is seen asleep.
    own().progress.store(progress(), std::memory_order_seq_cst);
    for (int32_t r = 0; r < size(); ++r)
      if (header_->ranks[r].is_asleep.load(std::memory_order_seq_cst) != 0) Wake(r);
  }

  void Wake(int32_t other) { SharedWakeAll(&header_->ranks[other].wake); }

  void WakeOthers() {
    for (int32_t r = 0; r < size(); ++r)
      if (r != rank()) Wake(r);
  }

  // Why this attempt has failed for all ranks, if it has. A rank that waits for one rank must hear of every failure:
  // that one may not come because of another.
  Error Failure() const {
    if (std::atomic_ref(header_->flags.is_aborted).load(std::memory_order_relaxed) != 0)
      return "the ranks' group was aborted";
    for (int32_t r = 0; r < size(); ++r) {
      const uint64_t failed_in = std::atomic_ref(header_->flags.failed_in[r]).load(std::memory_order_relaxed);
      if (failed_in == static_cast<uint64_t>(attempt_) + 1) return RankError(r, "has failed");
    }
    return nullptr;
  }

  // Whether there is nothing to wait for: the rank has come as far as this one, or will not, which is an error.
  bool IsOver(int32_t other, Error* error) const {
    *error = Failure();
    if (*error != nullptr) return true;
    const uint64_t seen = header_->ranks[other].progress.load(std::memory_order_acquire);
    if (seen < progress()) return false;
    if (seen >> 32 == static_cast<uint64_t>(attempt_)) return true;
    // It may have finished this attempt. Its buffers hold what it gave until all have begun the next one.
    const uint64_t last = header_->ranks[other].last_progress.load(std::memory_order_relaxed);
    const bool has_finished = last >> 32 == static_cast<uint64_t>(attempt_) && last >= progress();
    if (!has_finished) *error = RankError(other, "has begun another attempt");
    return true;
  }

  Error WaitForAll() {
    for (int32_t r = 0; r < size(); ++r)
      if (const Error error = WaitFor(r)) return error;
    return nullptr;
  }

  Error WaitFor(int32_t other) {
    Error error = nullptr;
    if (IsOver(other, &error)) return error;
    return Poll(kSpinNanoseconds, [&] { return IsOver(other, &error); }) ? error : SleepUntil(other);
  }

  Error SleepUntil(int32_t other) {
    // Only naps count: while the process itself is stopped, its timeout does not end.
    for (int64_t left = timeout_; left > 0;) {
      const int64_t before = MonotonicNs();
      const uint32_t seen = own().wake.load(std::memory_order_seq_cst);
      own().is_asleep.store(1, std::memory_order_seq_cst);
      Error error = nullptr;
      bool is_over = IsOver(other, &error);
      if (!is_over) SharedNap(&own().wake, seen, kNapNanoseconds);
      own().is_asleep.store(0, std::memory_order_seq_cst);
      if (is_over || IsOver(other, &error)) return error;
      left -= std::min(MonotonicNs() - before, 2 * kNapNanoseconds);
    }
    Fail();
    return RankError(other, "did not come in time");
  }

  Header* const header_;
  const int64_t num_bytes_;
  const int64_t buffer_bytes_;
  const int64_t timeout_;
  int64_t attempt_ = 0;
  uint32_t count_ = 0;  // exchanges of the attempt
};

}  // namespace

Error OpenShared(const SharedCommunicatorParams& p) {
  if (p.size != 2 && p.size != 4) return "size: expected 2 or 4 ranks, got another number";
  if (p.rank < 0 || p.rank >= p.size) return "rank: expected one of the group's, got another";
  if (!(p.timeout_s > 0 && p.timeout_s <= 1e6)) return "timeout_s: expected a positive number up to 1e6, got another";
  struct stat status;
  if (fstat(p.file, &status) != 0) return "file: expected the descriptor of a segment, got another number";
  const int64_t buffer_bytes =
      std::min(kMaxBufferBytes, (status.st_size - kHeaderBytes) / (2 * p.size) / kLineBytes * kLineBytes);
  if (buffer_bytes < kMinBufferBytes) return "file: expected a segment of at least 8192 bytes, got a smaller one";
  void* const segment =
      mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, p.file, 0);
  if (segment == MAP_FAILED) return "file: expected a segment that can be mapped, got another";
  auto communicator = std::make_unique<SharedCommunicator>(p, segment, status.st_size, buffer_bytes);
  int32_t size = 0;
  std::atomic<int32_t>& known_size = static_cast<Header*>(segment)->size;
  if (!known_size.compare_exchange_strong(size, p.size) && size != p.size) {
    return "size: expected the segment's number of ranks, got another";
  }
  return AddCommunicator(std::move(communicator), p.communicator);
}

}  // namespace fdsd
