#include "scratch.h"

#include <cstdlib>

namespace fdsd {

void* ScratchBytes(Scratch use, int64_t num_bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<int>(use)];
  if (buffer.size < num_bytes) {
    std::free(buffer.data);
    const int64_t size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, static_cast<size_t>(size));
    if (buffer.data == nullptr) std::abort();
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace fdsd
