#include "emulation/launches.h"

#include <mutex>

namespace fdsd::emulation {

namespace {

std::mutex mutex;
bool notes = false;
std::string noted;

}  // namespace

std::string PlainName(const std::string& whole) {
  const std::string label = "kernel = ";
  const size_t label_begin = whole.find(label);
  if (label_begin == std::string::npos) return whole;
  const size_t begin = label_begin + label.size();
  std::string name = whole.substr(begin, whole.find_first_of(";]", begin) - begin);
  for (const std::string part : {"fdsd::", "cuda::", "{anonymous}::"}) {
    for (size_t at = name.find(part); at != std::string::npos; at = name.find(part)) name.erase(at, part.size());
  }
  return name;
}

void NoteLaunches(bool is_noted) {
  const std::lock_guard lock(mutex);
  notes = is_noted;
  noted.clear();
}

bool NoteLaunch(const char* name, Size3 block, int32_t dynamic_bytes) {
  const std::lock_guard lock(mutex);
  if (!notes) return false;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  noted += std::to_string(threads) + " " + std::to_string(dynamic_bytes) + " " + PlainName(name) + "\n";
  return true;
}

const char* NotedLaunches() { return noted.c_str(); }

}  // namespace fdsd::emulation
