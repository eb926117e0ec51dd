// Sums and columns of several ranks: the communicator carries bytes, everything else happens here.
#include "fdsd/collective.h"

#include "communicator.h"
#include "linear_layout.h"
#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Floats that a thread adds at a time.
constexpr int64_t kPieceFloats = 16 << 10;

// Who takes part in an op: one rank alone where the handle is 0.
struct Ranks {
  Communicator* communicator;
  int32_t rank;
  int32_t size;

  int64_t max_bytes() const {
    return communicator == nullptr ? std::numeric_limits<int64_t>::max() : communicator->max_bytes();
  }
  Error Exchange(const void* mine, int64_t num_bytes, int64_t most_bytes, const void** parts) const {
    parts[0] = mine;
    return communicator == nullptr ? nullptr : communicator->Exchange(mine, num_bytes, most_bytes, parts);
  }
};

Error FindRanks(int32_t handle, Ranks* ranks) {
  *ranks = {FindCommunicator(handle), 0, 1};
  if (handle == 0) return nullptr;
  if (ranks->communicator == nullptr) return "communicator: expected 0 or an open one, got another";
  ranks->rank = ranks->communicator->rank();
  ranks->size = ranks->communicator->size();
  return nullptr;
}

// Floats [i, i + n) of every rank, added in their tree.
template <int kRanks>
FDSD_INLINE F32x16 AddRanks(const void* const* parts, int64_t i, int n) {
  if constexpr (kRanks == 1) {
    const float* const x = static_cast<const float*>(parts[0]) + i;
    return n == kLanes ? Load(x) : LoadPartial(x, n);
  } else {
    return Add(AddRanks<kRanks / 2>(parts, i, n), AddRanks<kRanks / 2>(parts + kRanks / 2, i, n));
  }
}

// Elements [begin, end) of y; parts[r] points to rank r's elements from `first` on.
template <int kRanks, typename T>
void AddPiece(const AllReduceParams& p, const void* const* parts, int64_t first, int64_t begin, int64_t end) {
  T* const y = static_cast<T*>(p.y);
  const T* const shared = static_cast<const T*>(p.shared);
  for (int64_t i = begin; i < end;) {
    const int64_t column = i % p.num_columns;
    const int64_t row_end = std::min(end, i - column + p.num_columns);
    const float* const bias = p.bias == nullptr ? nullptr : p.bias + column - i;
    for (; i < row_end; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, row_end - i));
      F32x16 v = AddRanks<kRanks>(parts, i - first, n);
      if (bias != nullptr) v = Add(v, LoadPartial(bias + i, n));
      if (shared != nullptr) v = Add(v, LoadPartial(shared + i, n));
      StorePartial(v, y + i, n);
    }
    i = row_end;
  }
}

template <int kRanks>
void AddElements(const AllReduceParams& p, const void* const* parts, int64_t first, int64_t count) {
  ParallelFor(DivideUp(count, kPieceFloats), [&](int64_t piece) {
    const int64_t begin = first + piece * kPieceFloats;
    const int64_t end = std::min(first + count, begin + kPieceFloats);
    if (p.y_dtype == DType::kFloat32) {
      AddPiece<kRanks, float>(p, parts, first, begin, end);
    } else {
      AddPiece<kRanks, bf16>(p, parts, first, begin, end);
    }
  });
}

// Bytes [begin, begin + count) of a rank's [T, row_bytes] to its columns of y.
void PlaceBytes(const char* from, int64_t begin, int64_t count, int64_t row_bytes, int64_t y_row_bytes, char* y) {
  for (int64_t done = 0; done < count;) {
    const int64_t row = (begin + done) / row_bytes;
    const int64_t place = (begin + done) % row_bytes;
    const int64_t n = std::min(row_bytes - place, count - done);
    std::memcpy(y + row * y_row_bytes + place, from + done, static_cast<size_t>(n));
    done += n;
  }
}

}  // namespace

Error AllReduce(const AllReduceParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  Ranks ranks;
  if (const Error error = FindRanks(p.communicator, &ranks)) return error;
  const int64_t num_elements = int64_t{p.num_rows} * p.num_columns;
  const int64_t step = ranks.max_bytes() / static_cast<int64_t>(sizeof(float));
  for (int64_t first = 0; first < num_elements; first += std::min(step, num_elements - first)) {
    const int64_t count = std::min(step, num_elements - first);
    const int64_t num_bytes = count * static_cast<int64_t>(sizeof(float));
    const void* parts[kMaxRanks];
    if (const Error error = ranks.Exchange(p.x + first, num_bytes, num_bytes, parts)) return error;
    if (ranks.size == 1) {
      AddElements<1>(p, parts, first, count);
    } else if (ranks.size == 2) {
      AddElements<2>(p, parts, first, count);
    } else {
      AddElements<kMaxRanks>(p, parts, first, count);
    }
  }
  return nullptr;
}

Error AllGather(const AllGatherParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  if (p.unit < 1) return "unit: expected 1 or more, got another number";
  Ranks ranks;
  if (const Error error = FindRanks(p.communicator, &ranks)) return error;
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  int64_t column[kMaxRanks + 1];
  int64_t most_bytes = 0;
  for (int32_t r = 0; r <= ranks.size; ++r) column[r] = HalvingBorder(p.num_columns, ranks.size, p.unit, r);
  for (int32_t r = 0; r < ranks.size; ++r)
    most_bytes = std::max(most_bytes, p.num_rows * (column[r + 1] - column[r]) * element_bytes);
  if (p.num_own != column[ranks.rank + 1] - column[ranks.rank])
    return "x: expected the columns of the rank's range, got another number of them";
  const int64_t step = ranks.max_bytes();
  for (int64_t begin = 0; begin < most_bytes; begin += std::min(step, most_bytes - begin)) {
    const auto bytes_of = [&](int32_t r) {
      const int64_t num_bytes = p.num_rows * (column[r + 1] - column[r]) * element_bytes;
      return std::clamp<int64_t>(num_bytes - begin, 0, step);
    };
    const void* parts[kMaxRanks];
    if (const Error error = ranks.Exchange(static_cast<const char*>(p.x) + begin, bytes_of(ranks.rank),
                                           std::min(step, most_bytes - begin), parts))
      return error;
    ParallelFor(ranks.size, [&](int64_t r) {
      PlaceBytes(static_cast<const char*>(parts[r]), begin, bytes_of(static_cast<int32_t>(r)),
                 (column[r + 1] - column[r]) * element_bytes, p.num_columns * element_bytes,
                 static_cast<char*>(p.y) + column[r] * element_bytes);
    });
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
