// Ranks of several nodes, which reach each other by the caller's means, such as sockets or a framework's process group.
//
// The ranks of a node first exchange among themselves. The first of them then gives all that to the other nodes, and
// gives its own node what it gets from them. So each byte crosses between two nodes once.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "communicator.h"

namespace fdsd {
namespace {

constexpr int64_t kMaxBytes = 1 << 20;
constexpr int64_t kAlignment = 64;

// What goes before the bytes of a node: nodes at different points notice.
struct Tag {
  int64_t attempt;
  int64_t count;
  int64_t most_bytes;
};

class CallbackCommunicator final : public Communicator {
 public:
  CallbackCommunicator(const CallbackCommunicatorParams& p, Communicator* local)
      : Communicator(p.rank, p.size),
        exchange_(reinterpret_cast<ExchangeFunction>(const_cast<void*>(p.exchange))),
        local_(local),
        per_node_(local == nullptr ? 1 : local->size()),
        num_nodes_(p.size / per_node_) {}

  // As much as, with those of all others, can be handed to the ranks of a node at once.
  int64_t max_bytes() const override {
    if (local_ == nullptr) return kMaxBytes;
    const int64_t of_node = local_->max_bytes() / num_nodes_ - static_cast<int64_t>(sizeof(Tag));
    return of_node / per_node_ / kAlignment * kAlignment;
  }

  Error Begin(int64_t attempt) override {
    if (attempt <= tag_.attempt) return "attempt: expected a higher number than before, got another";
    tag_ = {attempt, 0, 0};
    has_failed_ = false;
    return local_ == nullptr ? nullptr : local_->Begin(attempt);
  }

  void Fail() override {
    has_failed_ = true;
    if (local_ != nullptr) local_->Fail();
  }

  void Abort() override {
    is_aborted_ = true;
    if (local_ != nullptr) local_->Abort();
  }

  Error Exchange(const void* mine, int64_t num_bytes, int64_t most_bytes, const void** parts) override {
    if (is_aborted_) return "the ranks' group was aborted";
    if (has_failed_) return RankError(rank(), "has failed");
    ++tag_.count;
    tag_.most_bytes = most_bytes;
    const int64_t node_bytes = static_cast<int64_t>(sizeof(Tag)) + per_node_ * most_bytes;
    const char* all = nullptr;
    if (const Error error = FromNodes(mine, num_bytes, most_bytes, node_bytes, &all)) return error;
    for (int32_t node = 0; node < num_nodes_; ++node) {
      const char* const message = all + node * node_bytes;
      if (std::memcmp(message, &tag_, sizeof(Tag)) != 0) {
        Fail();
        return RankError(node * per_node_, "is at another exchange: expected the same ops on all ranks");
      }
      for (int32_t i = 0; i < per_node_; ++i) {
        parts[node * per_node_ + i] = message + static_cast<int64_t>(sizeof(Tag)) + i * most_bytes;
      }
    }
    return nullptr;
  }

 private:
  // *all then points to the messages of all nodes.
  Error FromNodes(const void* mine, int64_t num_bytes, int64_t most_bytes, int64_t node_bytes, const char** all) {
    const void* local_parts[kMaxRanks] = {mine};
    if (local_ != nullptr) {
      if (const Error error = local_->Exchange(mine, num_bytes, most_bytes, local_parts)) return error;
    }
    const int64_t all_bytes = num_nodes_ * node_bytes;
    if (exchange_ != nullptr) {
      mine_.resize(static_cast<size_t>(node_bytes));
      all_.resize(static_cast<size_t>(all_bytes));
      std::memcpy(mine_.data(), &tag_, sizeof(Tag));
      for (int32_t i = 0; i < per_node_; ++i) {  // the first is this rank
        std::memcpy(mine_.data() + sizeof(Tag) + i * most_bytes, local_parts[i],
                    static_cast<size_t>(i == 0 ? num_bytes : most_bytes));
      }
      if (exchange_(mine_.data(), node_bytes, all_.data()) != 0) {
        Fail();
        return is_aborted_ ? "the ranks' group was aborted" : "the exchange with the other ranks failed";
      }
    }
    *all = all_.data();
    if (local_ == nullptr) return nullptr;
    const int64_t given = exchange_ == nullptr ? 0 : all_bytes;
    if (const Error error = local_->Exchange(all_.data(), given, all_bytes, local_parts)) return error;
    *all = static_cast<const char*>(local_parts[0]);
    return nullptr;
  }

  const ExchangeFunction exchange_;
  Communicator* const local_;
  const int32_t per_node_;
  const int32_t num_nodes_;
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
  Communicator* const local = p.local == 0 ? nullptr : FindCommunicator(p.local);
  if (p.local != 0 && local == nullptr) return "local: expected an open communicator, got another handle";
  const int32_t per_node = local == nullptr ? 1 : local->size();
  if (p.size % per_node != 0 || p.size == per_node) return "local: expected equally many ranks on two nodes or more";
  if (local != nullptr && local->rank() != p.rank % per_node) return "local: expected this rank's place in its node";
  if ((p.exchange != nullptr) != (p.rank % per_node == 0)) return "exchange: expected one on the first rank of a node";
  auto communicator = std::make_unique<CallbackCommunicator>(p, local);
  if (communicator->max_bytes() < kAlignment) return "local: expected a communicator of larger messages";
  return AddCommunicator(std::move(communicator), p.communicator);
}

}  // namespace fdsd
