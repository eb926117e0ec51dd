#include "emulation/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

namespace fdsd::emulation {
namespace {

constexpr size_t kPageBytes = 4096;

size_t WholePages(size_t num_bytes) { return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

char* Map(void* wanted, size_t size, int flags, int file) {
  void* const memory = mmap(wanted, size, PROT_READ | PROT_WRITE, flags, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

}  // namespace

Pages Pages::New(size_t num_bytes) {
  Pages made;
  made.size_ = WholePages(num_bytes > 0 ? num_bytes : 1);
  made.begin_ = Map(nullptr, made.size_, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  return made;
}

Pages Pages::Open(int process, int file, size_t num_bytes) {
  Pages made;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", process, file);
  const int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return made;
  made.size_ = WholePages(num_bytes);
  made.begin_ = Map(nullptr, made.size_, MAP_SHARED, opened);
  close(opened);
  return made;
}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(begin_, other.begin_);
  std::swap(size_, other.size_);
  std::swap(file_, other.file_);
  return *this;
}

Pages::~Pages() {
  if (begin_ != nullptr) munmap(begin_, size_);
  if (file_ >= 0) close(file_);
}

int Pages::Share() {
  if (file_ >= 0) return file_;
  const int made = memfd_create("emulated-gpu", MFD_CLOEXEC);
  if (made < 0) return -1;
  char* const copy = ftruncate(made, static_cast<off_t>(size_)) == 0 ? Map(nullptr, size_, MAP_SHARED, made) : nullptr;
  if (copy != nullptr) {
    std::memcpy(copy, begin_, size_);
    munmap(copy, size_);
    if (Map(begin_, size_, MAP_SHARED | MAP_FIXED, made) != nullptr) return file_ = made;
  }
  close(made);
  return -1;
}

}  // namespace fdsd::emulation
