#pragma once
// The bytes of a mirror's frames: a header, then arrays without gaps.
#include <cstring>

#include "expert_mirror.h"

namespace fdsd {

constexpr uint32_t kMirrorMagic = 0x4d584446;  // "FDXM"
constexpr uint32_t kMirrorVersion = 1;

inline int64_t MirrorBodyBytes(const ExpertServiceShape& s, int32_t per_host, MirrorKind kind, int64_t num_rows,
                               int64_t num_pairs) {
  switch (kind) {
    case MirrorKind::kRank:
      return 0;
    case MirrorKind::kSlots:
      return int64_t{4} * s.num_layers * per_host * s.num_slots;
    case MirrorKind::kTarget:
      return int64_t{4} * s.num_ranks * s.num_slots;
    case MirrorKind::kCounts:
      return int64_t{8} * s.num_layers * (s.num_experts + 1);
    case MirrorKind::kJob:
      return int64_t{4} * (per_host + 1) + num_pairs * static_cast<int64_t>(sizeof(ExpertPair)) +
             num_rows * s.row_bytes;
    case MirrorKind::kResults:
      return int64_t{4} * num_pairs * s.hidden_size;
  }
  return -1;
}

class MirrorWriter {
 public:
  MirrorWriter(char* frame, const MirrorHeader& header) : frame_(frame), end_(frame + sizeof(MirrorHeader)) {
    SetHeader(header);
  }
  void SetHeader(const MirrorHeader& header) { std::memcpy(frame_, &header, sizeof(header)); }
  char* Take(int64_t num_bytes) {
    char* const begin = end_;
    end_ += num_bytes;
    return begin;
  }
  template <typename T>
  void Put(const T* values, int64_t count) {
    const int64_t num_bytes = count * static_cast<int64_t>(sizeof(T));
    std::memcpy(Take(num_bytes), values, static_cast<size_t>(num_bytes));
  }
  template <typename T>
  void Put(const T& value) {
    Put(&value, 1);
  }
  int64_t num_bytes() const { return end_ - frame_; }

 private:
  char* const frame_;
  char* end_;
};

// The i-th of values that lie anywhere.
template <typename T>
T MirrorValue(const char* values, int64_t i) {
  T value;
  std::memcpy(&value, values + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace fdsd
