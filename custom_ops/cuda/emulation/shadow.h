#pragma once
// What is remembered of memory's bytes: who touched them last, and when.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace fdsd::emulation {

// One access: its thread, the periods it was in, and whether it was atomic. All zero: there was none, as periods count
// from 1.
struct Trace {
  uint32_t period = 0;
  uint32_t warp_period : 20 = 0;
  uint32_t thread : 11 = 0;
  uint32_t is_atomic : 1 = 0;

  bool exists() const { return period != 0; }
  uint32_t warp() const { return thread / 32; }
};
static_assert(sizeof(Trace) == 8);

// What is remembered of a byte: the last write, and up to two reads since that a later write must not meet.
struct Shadow {
  Trace write;
  Trace read;
  Trace other_read;
};

// The Shadow of every byte of an allocation. The bytes of a word share one until an access touches a part of the word,
// and again when the whole word is written. So nearly all do, and an access costs a step per word. Words that no access
// touches take no memory.
class Shadows {
 public:
  static constexpr size_t kWordBytes = 4;

  Shadows() = default;
  // Throws std::bad_alloc.
  explicit Shadows(size_t num_bytes)
      : words_(static_cast<Shadow*>(std::calloc(num_bytes / kWordBytes + 1, sizeof(Shadow)))) {
    if (words_ == nullptr) throw std::bad_alloc();
  }

  // Calls visit(offset, &shadow) for the bytes from `begin` to before `end`, in their order, once for those of a word
  // that have a shadow in common. `are_alike`: whether visit leaves the same in all of them.
  template <typename Visit>
  void ForEach(size_t begin, size_t end, bool are_alike, const Visit& visit) {
    for (size_t next; begin < end; begin = next) {
      const size_t word = begin / kWordBytes;
      next = std::min(end, (word + 1) * kWordBytes);
      const bool is_whole = next - begin == kWordBytes;
      Shadow* const shadow = &words_.get()[word];
      if (is_whole && !IsSplit(*shadow)) {
        visit(begin, shadow);
        continue;
      }
      for (size_t i = begin; i < next; ++i) visit(i, &Split(shadow)[i % kWordBytes]);
      if (is_whole && are_alike) Join(shadow);
    }
  }

 private:
  struct Free {
    void operator()(Shadow* words) const { std::free(words); }
  };
  using Bytes = std::array<Shadow, kWordBytes>;
  // No launch has so many periods. The read's period says then where the bytes' own shadows are.
  static constexpr uint32_t kSplit = 0xffffffffu;

  static bool IsSplit(const Shadow& shadow) { return shadow.write.period == kSplit; }

  Bytes& Split(Shadow* shadow) {
    if (IsSplit(*shadow)) return splits_[shadow->read.period];
    if (unused_.empty()) {
      unused_.push_back(static_cast<uint32_t>(splits_.size()));
      splits_.emplace_back();
    }
    const uint32_t i = unused_.back();
    unused_.pop_back();
    splits_[i].fill(*shadow);
    shadow->write.period = kSplit;
    shadow->read.period = i;
    return splits_[i];
  }

  void Join(Shadow* shadow) {
    const uint32_t i = shadow->read.period;
    *shadow = splits_[i][0];
    unused_.push_back(i);
  }

  std::unique_ptr<Shadow, Free> words_;
  std::vector<Bytes> splits_;
  std::vector<uint32_t> unused_;  // of splits_
};

// Marks on words of a block's shared memory.
class Marks {
 public:
  void Set(size_t begin, size_t num_bytes, uint32_t mark) {
    const size_t end = (begin + num_bytes + Shadows::kWordBytes - 1) / Shadows::kWordBytes;
    if (marks_.size() < end) marks_.resize(end);
    for (size_t i = begin / Shadows::kWordBytes; i < end; ++i) marks_[i] = mark;
  }
  // The mark of a byte's word; 0: none.
  uint32_t Of(size_t offset) const {
    const size_t word = offset / Shadows::kWordBytes;
    return word < marks_.size() ? marks_[word] : 0;
  }
  // Whether one of the bytes' words has this mark; none has 0.
  bool Has(size_t begin, size_t num_bytes, uint32_t mark) const {
    const size_t end = (begin + num_bytes + Shadows::kWordBytes - 1) / Shadows::kWordBytes;
    for (size_t i = begin / Shadows::kWordBytes; i < std::min(end, marks_.size()); ++i) {
      if (marks_[i] == mark) return true;
    }
    return false;
  }

 private:
  std::vector<uint32_t> marks_;
};

}  // namespace fdsd::emulation
