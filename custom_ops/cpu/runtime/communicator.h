#pragma once
// How ranks exchange bytes inside an op. The caller forms the sums, never this code, so that they do not depend on what
// carries the bytes.
#include <cstdint>
#include <memory>

#include "fdsd/communicator.h"
#include "group_flags.h"

namespace fdsd {

// One rank's end. Used by one thread at a time, but for Fail and Abort, which any may call.
class Communicator {
 public:
  Communicator(int32_t rank, int32_t size) : rank_(rank), size_(size) {}
  virtual ~Communicator() = default;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }

  // Bytes that one exchange can carry from a rank.
  virtual int64_t max_bytes() const = 0;

  // Begin an attempt, whose number is higher than that of all before: what ranks did not finish of earlier ones is
  // forgotten. Every rank calls it before its exchanges; it waits for no rank.
  virtual Error Begin(int64_t attempt) = 0;

  // What Fail and Abort set for all ranks, on a page of its own; nullptr where ranks share no memory.
  virtual const GroupFlags* flags() const { return nullptr; }

  // Make this attempt's exchanges fail, everywhere and at once.
  virtual void Fail() = 0;

  // Make all exchanges fail, for ever, everywhere and at once.
  virtual void Abort() = 0;

  // Give `num_bytes` bytes and wait for every other rank's. parts[r] then points to what rank r gave, until the next
  // exchange. `most_bytes` is what the rank with the most gives, the same number on all ranks, at most max_bytes().
  // Fails when a rank has failed, does not come in time, or is at another attempt or exchange, and when the group was
  // aborted. The text names the rank, and lives until the calling thread's next error.
  virtual Error Exchange(const void* mine, int64_t num_bytes, int64_t most_bytes, const void** parts) = 0;

 private:
  const int32_t rank_;
  const int32_t size_;
};

// An error about a rank, in memory of the calling thread that its next such error overwrites.
Error RankError(int32_t rank, const char* what);

// What ops know of a communicator: a handle, 1 or more. There are at most kMaxCommunicators at a time in a process.
constexpr int32_t kMaxCommunicators = 256;
Error AddCommunicator(std::unique_ptr<Communicator> communicator, int32_t* handle);

// nullptr where no open one has the handle.
Communicator* FindCommunicator(int32_t handle);

// No exchange of it may be under way.
void CloseCommunicator(int32_t handle);

Error OpenShared(const SharedCommunicatorParams& p);
Error OpenCallback(const CallbackCommunicatorParams& p);

}  // namespace fdsd
