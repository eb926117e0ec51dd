#pragma once
// What a run keeps for the products in AMX tiles: its queries in whole tiles, and copies of values that tiles cannot
// read where they lie.
//
// A tile multiplies every value with every weight, those of 0 too, and 0 times infinity is NaN. So values of keys that
// no vector of the run sees are zeros, in a copy. Where a value that only some vectors see is not finite, rows are
// computed one after the other, each with a copy of what it sees. So a row's bits never depend on the other rows.
#include "attention_amx.h"
#include "attention_run.h"
#include "scratch_arrays.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

#if defined(FDSD_SIMD_AVX512)
// y = x of the pairs' elements in `seen`, else 0. Returns whether those in `checked` are finite. Both are masks of a
// pair.
FDSD_INLINE bool CopyPairs(const bf16* x, int num_pairs, uint32_t seen, uint32_t checked, bf16* y) {
  const __m512i exponent = _mm512_set1_epi32(static_cast<int>(checked & 0x7f807f80u));
  const __m512i all_ones = _mm512_set1_epi16(0x7f80);
  __mmask32 bad = 0;
  for (int i = 0; i < num_pairs; i += kLanes) {
    const __m512i pairs = MaskedPairs(x + 2 * i, seen);
    bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), all_ones);
    _mm512_storeu_si512(y + 2 * i, pairs);
  }
  return bad == 0;
}
#endif

template <typename T>
class RunAmx {
 public:
  using Query = typename KvDot<T>::Query;

  //   amx   nullptr: nothing of this is used
  //   q     [num_heads * num_vectors] of the run
  RunAmx(const AmxAttention* amx, const RunKeys<T>& keys, const QueryVector<Query>* q) : amx_(amx), keys_(keys) {
    if (amx == nullptr) return;
    const int head_dim = keys.head_dim();
    const int num_vectors = keys.num_heads() * keys.num_vectors();
    q_stride_ = RoundUpTo(head_dim, kAmxElements<T>);
    const auto take = [&](Arena arena) {
      q_ = arena.Take<Query>(int64_t{num_vectors + kAmxVectors} * q_stride_);
      copies_ = arena.Take<T>(int64_t{kPartitionKeys} * head_dim);
      return arena.size();
    };
    take(Arena(static_cast<char*>(ScratchBytes(Scratch::kInnerTask, take(Arena(nullptr))))));
    for (int i = 0; i < num_vectors; ++i) {
      std::memcpy(q_ + i * q_stride_, q[i].elements, head_dim * sizeof(Query));
      std::memset(q_ + i * q_stride_ + head_dim, 0, (q_stride_ - head_dim) * sizeof(Query));
    }
  }

  bool is_used() const { return amx_ != nullptr; }

  // Sums of products of head h's vectors with the keys from position `key` on, to scores[(h * num_vectors + i) *
  // kPartitionKeys..]. Then the rows of up to 15 vectors after the last one hold anything.
  void Scores(int h, int32_t key, const KvBlock<T>& block, float* scores) const {
    const int first = keys_.FirstVectorAt(key);
    const int64_t vector = h * keys_.num_vectors() + first;
    amx_->Of<T>().scores({q_ + vector * q_stride_, static_cast<int>(q_stride_), keys_.num_vectors() - first, block,
                          scores + vector * kPartitionKeys});
  }

  // Turn a vector's sums of products with the first `num_keys` keys of a partition, and those up to a whole block, into
  // scores.
  static void FinishScores(const QueryVector<Query>& q, const float* const (*k_scale)[kBlockPanels], int num_keys,
                           float* scores) {
    for (int key = 0; key < RoundUpTo(num_keys, kBlockKeys); key += kPanelKeys) {
      typename KvDot<T>::Sum sum;
      std::memcpy(&sum, scores + key, sizeof(sum));
      Store(KvDot<T>::FinishScore(sum, q, k_scale[key / kBlockKeys][key % kBlockKeys / kPanelKeys]), scores + key);
    }
  }

  // Head h's part of a partition.
  struct HeadValues {
    int h;
    int32_t begin;                             // position of the first key
    int num_keys;                              // up to the last one that a vector sees
    const KvBlock<T>* blocks;                  // of the head, as many as the keys need
    const KvBlock<T>* next;                    // read next
    const typename KvDot<T>::Weight* weights;  // [num_vectors][kPartitionKeys] of the head, 0 for hidden keys
    const float* factors;                      // int8: of each block [kMaxRunVectors]
    float* sums;                               // [num_vectors], sums_stride apart
    int64_t sums_stride;
  };

  // sums = sums, of which those over bfloat16 are 0, and then the values times their weights.
  void AddValues(const HeadValues& head) const {
    const int first = keys_.FirstVectorAt(head.begin);
    const int end = keys_.EndVectorBefore(head.begin + head.num_keys);
    if (AddVectors(head, first, end - first)) return;
    for (int i = first; i < end; i += keys_.group()) AddVectors(head, i, keys_.group());
  }

 private:
  static constexpr int kStepKeys = kAmxElements<T>;
  static constexpr int kStepPanels = kStepKeys / kPanelKeys;

  // Returns false, and adds nothing, where the vectors must not share their values.
  bool AddVectors(const HeadValues& head, int first, int count) const {
    AmxValues<T> x{};
    x.weights = head.weights + first * kPartitionKeys;
    x.num_vectors = count;
    x.num_steps = RoundUpTo(head.num_keys, kStepKeys) / kStepKeys;
    x.head_dim = keys_.head_dim();
    x.sums = head.sums + first * head.sums_stride;
    x.sums_stride = head.sums_stride;
    x.factors = head.factors + first;
    const KeyRange one = keys_.Seen(first, head.begin, head.num_keys);
    const KeyRange last = keys_.Seen(first + count - 1, head.begin, head.num_keys);
    for (int step = 0; step < x.num_steps; ++step) {
      const int key = step * kStepKeys;
      const T* panels[kStepPanels];
      for (int i = 0; i < kStepPanels; ++i) panels[i] = Panel(head.blocks, key + i * kPanelKeys);
      x.next[step] = Panel(head.next, key);
      x.first_vectors[step] = std::max(keys_.FirstVectorAt(head.begin + key) - first, 0);
      bool is_in_place = true;
      for (int i = 1; i < kStepPanels; ++i) is_in_place &= panels[i] == panels[0] + i * kPanelKeys * x.head_dim;
      if constexpr (KvDot<T>::kSkipsHidden) is_in_place &= last.begin <= key && key + kStepKeys <= one.end;
      if (is_in_place) {
        x.v[step] = panels[0];
        continue;
      }
      T* const copy = copies_ + int64_t{key} * x.head_dim;
      x.v[step] = copy;
      if (!Copy(panels, {one.begin - key, last.end - key}, {last.begin - key, one.end - key}, copy)) return false;
    }
    amx_->Of<T>().values(x);
    return true;
  }

  static const T* Panel(const KvBlock<T>* blocks, int key) {
    return blocks[key / kBlockKeys].v[key % kBlockKeys / kPanelKeys];
  }

  // A step's values, with zeros for keys outside of `some`, which the first or a later vector sees. Returns whether
  // those outside of `all`, which every vector sees, are finite.
  bool Copy(const T* const* panels, KeyRange some, KeyRange all, T* copy) const {
    const int64_t row = int64_t{keys_.head_dim()} * kPackSize<T>;
    constexpr int kPanelRows = kPanelKeys / kPackSize<T>;
    bool is_finite = true;
    for (int r = 0; r < kAmxPacks; ++r) {
      const T* const from = panels[r / kPanelRows] + r % kPanelRows * row;
      if constexpr (KvDot<T>::kSkipsHidden) {
        uint32_t seen = 0;
        uint32_t checked = 0;
        for (int i = 0; i < kPackSize<T>; ++i) {
          const int key = r * kPackSize<T> + i;
          const uint32_t bits = 0xffffu << 16 * i;
          if (key >= some.begin && key < some.end) seen |= bits;
          if (key < all.begin || key >= all.end) checked |= bits;
        }
        is_finite &= CopyPairs(from, keys_.head_dim(), seen, checked, copy + r * row);
      } else {
        std::memcpy(copy + r * row, from, row * sizeof(T));
      }
    }
    return is_finite;
  }

  const AmxAttention* const amx_;
  const RunKeys<T>& keys_;
  int64_t q_stride_ = 0;
  Query* q_ = nullptr;
  T* copies_ = nullptr;
};

}  // namespace FDSD_ISA
}  // namespace fdsd
