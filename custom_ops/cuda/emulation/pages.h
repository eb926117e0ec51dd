#pragma once
// Whole pages of memory, which other processes can map from the moment on that a file is made of them.
#include <cstddef>

namespace fdsd::emulation {

class Pages {
 public:
  Pages() = default;
  // begin() is nullptr where there is no memory.
  static Pages New(size_t num_bytes);
  // Those of another process's file, from its process id and its descriptor there.
  static Pages Open(int process, int file, size_t num_bytes);

  Pages(Pages&& other) noexcept { *this = static_cast<Pages&&>(other); }
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  char* begin() const { return begin_; }
  // The descriptor of a file that holds them, the same every time; -1 where the system gives none. They stay where
  // they are, and hold what they did.
  int Share();

 private:
  char* begin_ = nullptr;
  size_t size_ = 0;
  int file_ = -1;
};

}  // namespace fdsd::emulation
