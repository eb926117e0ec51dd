// Ranks that reach each other by somebody else's means, such as a framework's process group.
#include <atomic>
#include <cstring>
#include <vector>

#include "communicator.h"

namespace fdsd {
namespace {

constexpr int64_t kMaxBytes = 1 << 20;

// What goes before the bytes: ranks at different points notice.
struct Tag {
  int64_t attempt;
  int64_t count;
  int64_t most_bytes;
  int64_t has_failed;
};

class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const CallbackCommunicatorParams& p)
      : Communicator(p.rank, p.size), exchange_(reinterpret_cast<ExchangeFunction>(const_cast<void*>(p.exchange))) {}

  int64_t max_bytes() const override { return kMaxBytes; }

  Error Begin(int64_t attempt) override {
    if (attempt <= tag_.attempt) return "attempt: expected a higher number than before, got another";
    tag_ = {attempt, 0, 0, 0};
    has_failed_ = false;
    return nullptr;
  }

  void Fail() override { has_failed_ = true; }
  void Abort() override { is_aborted_ = true; }

  Error Exchange(const void* mine, int64_t num_bytes, int64_t most_bytes, const void** parts) override {
    if (is_aborted_) return "the ranks' group was aborted";
    if (has_failed_) return RankError(rank(), "has failed");
    ++tag_.count;
    tag_.most_bytes = most_bytes;
    const int64_t message_bytes = static_cast<int64_t>(sizeof(Tag)) + most_bytes;
    mine_.resize(static_cast<size_t>(message_bytes));
    all_.resize(static_cast<size_t>(message_bytes * size()));
    std::memcpy(mine_.data(), &tag_, sizeof(Tag));
    std::memcpy(mine_.data() + sizeof(Tag), mine, static_cast<size_t>(num_bytes));
    if (exchange_(mine_.data(), message_bytes, all_.data()) != 0) {
      has_failed_ = true;
      return is_aborted_ ? "the ranks' group was aborted" : "the exchange with the other ranks failed";
    }
    for (int32_t r = 0; r < size(); ++r) {
      const char* const message = all_.data() + r * message_bytes;
      if (std::memcmp(message, &tag_, sizeof(Tag)) != 0) {
        has_failed_ = true;
        return RankError(r, "is at another exchange: expected the same ops on all ranks");
      }
      parts[r] = message + sizeof(Tag);
    }
    return nullptr;
  }

 private:
  const ExchangeFunction exchange_;
  Tag tag_{};
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_aborted_{false};
  std::vector<char> mine_;
  std::vector<char> all_;
};

}  // namespace

Error OpenCallback(const CallbackCommunicatorParams& p) {
  if (p.size != 2 && p.size != 4) return "size: expected 2 or 4 ranks, got another number";
  if (p.rank < 0 || p.rank >= p.size) return "rank: expected one of the group's, got another";
  return AddCommunicator(std::make_unique<CallbackCommunicator>(p), p.communicator);
}

}  // namespace fdsd
