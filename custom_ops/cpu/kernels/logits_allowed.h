#pragma once
// The tokens of a row that its grammar allows, as bits.
#include "fdsd/sampling.h"
#include "logits_row.h"

namespace fdsd {
namespace FDSD_ISA {

class AllowedTokens {
 public:
  // Row `index` of the logits; it may allow every token.
  AllowedTokens(const AllowedBits& allowed, int64_t index, int vocab_size)
      : words_(allowed.allowed_rows[index] < 0
                   ? nullptr
                   : allowed.allowed_bits +
                         static_cast<int64_t>(allowed.allowed_rows[index]) * allowed.num_allowed_words),
        vocab_size_(vocab_size) {}

  bool are_all() const { return words_ == nullptr; }

  // How many are allowed, or any number above the limit where they are more. Not for all.
  int CountUpTo(int limit) const {
    int count = 0;
    for (int w = 0; w < NumWords() && count <= limit; ++w) count += __builtin_popcount(Word(w));
    return count;
  }

  // Write their ids, rising. Not for all.
  void List(int32_t* ids) const {
    for (int w = 0; w < NumWords(); ++w)
      for (uint32_t bits = Word(w); bits != 0; bits &= bits - 1) *ids++ = w * kWordBits + __builtin_ctz(bits);
  }

  // Copy logits [begin, end), -inf for those that are not allowed; begin is a multiple of kLanes, and both may be the
  // same array. Not for all.
  void Copy(const float* logits, int begin, int end, float* y) const {
    int i = begin;
    for (; i + kLanes <= end; i += kLanes)
      Store(KeepLanes(Load(logits + i), static_cast<uint32_t>(words_[i / kWordBits]) >> i % kWordBits & 0xffffu, -kInf),
            y + i);
    for (; i < end; ++i) y[i] = Word(i / kWordBits) >> i % kWordBits & 1u ? logits[i] : -kInf;
  }

 private:
  static constexpr int kWordBits = 32;

  int NumWords() const { return CeilDiv(vocab_size_, kWordBits); }

  // The bits after the vocabulary say nothing.
  uint32_t Word(int w) const {
    const int num_bits = std::min(kWordBits, vocab_size_ - w * kWordBits);
    return static_cast<uint32_t>(words_[w]) & (num_bits < kWordBits ? (1u << num_bits) - 1 : ~0u);
  }

  const int32_t* words_;  // nullptr = all are allowed
  int vocab_size_;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
