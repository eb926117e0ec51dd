#pragma once
// What streams and events of the emulated device are, for the functions over them.
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "emulation/cuda_api.h"

namespace fdsd::emulation {

// Operations, numbered from 1 on; the first num_done of them are done, and the next one may be under way.
struct Stream : std::enable_shared_from_this<Stream> {
  std::deque<Operation> waiting;
  uint64_t num_done = 0;
  bool is_running = false;
  std::unique_ptr<Graph> captured;

  uint64_t end() const { return num_done + (is_running ? 1 : 0) + waiting.size(); }
};

// Done when `stream` has done its first `end` operations; no stream = never recorded, which is done.
struct Event {
  std::shared_ptr<Stream> stream;
  uint64_t end = 0;
  std::chrono::steady_clock::time_point time;
};

struct Graph {
  std::shared_ptr<std::vector<Operation>> operations = std::make_shared<std::vector<Operation>>();
};

// Of everything here, and of what streams do.
std::recursive_mutex& StreamsMutex();
// Do a stream's operations up to number `end`; those of no stream are done. Where another thread runs one that rests,
// it waits for that.
Error RunTo(Stream* stream, uint64_t end);
// The status of a wait that met this error, or none.
cudaError_t Waited(Error error);

}  // namespace fdsd::emulation
