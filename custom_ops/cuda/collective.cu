// Sums and columns of several GPUs. A rank copies what it gives into a buffer that the others can read, and the ranks
// meet. Then each adds all of them in the tree of ranks, or puts them side by side. Every rank does the same, so all
// have the same bits, which are the CPU's.
#include <algorithm>

#include "communicator.h"
#include "fdsd/collective.h"
#include "linear_layout.h"
#include "numbers.h"
#include "ops.h"
#include "row_copy.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;
// Elements of a thread: neighbours of other threads', so that a warp reads whole lines.
constexpr int kEach = 4;

// What a rank gave of a part: from `first` on in the epoch's buffer of each, or of x where the rank is alone.
template <typename T>
struct Given {
  DevicePtr<const T> ranks[kMaxRanks];
  DevicePtr<const uint64_t> epoch;  // nullptr = alone
  int64_t buffer_size;              // elements
  int64_t first;

  __device__ __forceinline__ int64_t Begin() const {
    return epoch == nullptr ? first : BufferOffset(epoch[0], buffer_size);
  }
};

// Elements [first, first + count) of [T, H].
struct SummedPart {
  int64_t first;
  int64_t count;
  int32_t num_columns;
};

// Block: kThreads * kEach neighbouring elements.
template <typename T>
__global__ __launch_bounds__(kThreads) void PublishKernel(int64_t count, DevicePtr<const T> x,
                                                          DevicePtr<const uint64_t> epoch, DevicePtr<T> buffers,
                                                          int64_t buffer_size) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  // The exchange that this one is becomes the epoch when the ranks meet.
  const DevicePtr<T> buffer = buffers + BufferOffset(epoch[0] + 1, buffer_size);
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i < count) buffer[i] = x[i];
  }
}

// The same elements of every rank, added in their tree.
template <int kRanks>
__device__ __forceinline__ float AddRanks(const Given<float>& x, int first_rank, int64_t i) {
  if constexpr (kRanks == 1) {
    return x.ranks[first_rank][i];
  } else {
    const float left = AddRanks<kRanks / 2>(x, first_rank, i);
    return left + AddRanks<kRanks / 2>(x, first_rank + kRanks / 2, i);
  }
}

template <int kRanks, typename T>
__global__ __launch_bounds__(kThreads) void AddRanksKernel(SummedPart part, Given<float> x, DevicePtr<const float> bias,
                                                           DevicePtr<const T> shared, DevicePtr<T> y) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  const int64_t offset = x.Begin();
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i >= part.count) return;
    const int64_t at = part.first + i;
    float sum = AddRanks<kRanks>(x, 0, offset + i);
    if (!(bias == nullptr)) sum = sum + bias[at % part.num_columns];
    if (!(shared == nullptr)) sum = sum + LoadFloat<T>(shared, at);
    y[at] = FromFloat<T>(sum);
  }
}

// Columns of [T, N] by rank, in units of a copy; a part has elements [first, first + count(rank)) of each rank's own.
struct GatheredPart {
  int64_t first;
  int64_t most;  // elements of a rank
  int64_t num_rows;
  int64_t columns[kMaxRanks + 1];

  __host__ __device__ int64_t Width(int rank) const { return columns[rank + 1] - columns[rank]; }
  __host__ __device__ int64_t Count(int rank) const {
    const int64_t left = num_rows * Width(rank) - first;
    return left < 0 ? 0 : left < most ? left : most;
  }
};

// Block (part, rank).
template <typename Unit>
__global__ __launch_bounds__(kThreads) void PlaceColumnsKernel(GatheredPart part, int num_ranks, Given<Unit> x,
                                                               DevicePtr<Unit> y) {
  const int rank = static_cast<int>(blockIdx.y);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  const int64_t offset = x.Begin();
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i >= part.Count(rank)) return;
    const int64_t row = (part.first + i) / part.Width(rank);
    const int64_t column = (part.first + i) % part.Width(rank);
    y[row * part.columns[num_ranks] + part.columns[rank] + column] = x.ranks[rank][offset + i];
  }
}

unsigned NumBlocks(int64_t count) { return static_cast<unsigned>(DivideUp(count, int64_t{kThreads} * kEach)); }

// Give elements [first, first + count) of x, and receive where the others' are. A rank that is alone has x.
template <typename T>
Error Exchange(const RankGroup* group, const void* x, int64_t first, int64_t count, Given<T>* given, Stream stream) {
  given->first = first;
  if (group == nullptr) {
    given->ranks[0] = DevicePtr<const T>(x);
    return nullptr;
  }
  given->epoch = DevicePtr<const uint64_t>(&group->signals[group->rank]->epoch);
  given->buffer_size = group->buffer_bytes / static_cast<int64_t>(sizeof(T));
  if (Error error = Launch<PublishKernel<T>>(LaunchShape{dim3(NumBlocks(count)), dim3(kThreads)}, stream, count,
                                             DevicePtr<const T>(x) + first, given->epoch,
                                             DevicePtr<T>(group->buffers[group->rank]), given->buffer_size))
    return error;
  for (int32_t r = 0; r < group->size; ++r) given->ranks[r] = DevicePtr<const T>(group->buffers[r]);
  return MeetRanks(*group, stream);
}

template <int kRanks>
Error AddPart(const AllReduceParams& p, const SummedPart& part, const Given<float>& x, Stream stream) {
  const LaunchShape shape{dim3(NumBlocks(part.count)), dim3(kThreads)};
  const DevicePtr<const float> bias(p.bias);
  return WithElement(p.y_dtype, [&](auto element) {
    using T = decltype(element);
    return Launch<AddRanksKernel<kRanks, T>>(shape, stream, part, x, bias, DevicePtr<const T>(p.shared),
                                             DevicePtr<T>(p.y));
  });
}

// Who takes part: one rank alone where the handle is 0.
Error FindRanks(int32_t handle, const RankGroup** group) {
  *group = FindRankGroup(handle);
  return handle != 0 && *group == nullptr ? "communicator: expected 0 or an open one, got another" : nullptr;
}

// What one exchange carries, of elements of so many bytes.
int64_t StepOf(const RankGroup* group, int64_t element_bytes, int64_t all) {
  return group == nullptr ? std::max<int64_t>(all, 1) : group->buffer_bytes / element_bytes;
}

}  // namespace

Error AllReduce(const AllReduceParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  const RankGroup* group = nullptr;
  if (Error error = FindRanks(p.communicator, &group)) return error;
  const int64_t count = static_cast<int64_t>(p.num_rows) * p.num_columns;
  const int64_t step = StepOf(group, sizeof(float), count);
  for (int64_t first = 0; first < count; first += step) {
    const SummedPart part{first, std::min(step, count - first), p.num_columns};
    Given<float> x{};
    if (Error error = Exchange(group, p.x, first, part.count, &x, stream)) return error;
    const Error error = group == nullptr   ? AddPart<1>(p, part, x, stream)
                        : group->size == 2 ? AddPart<2>(p, part, x, stream)
                                           : AddPart<kMaxRanks>(p, part, x, stream);
    if (error != nullptr) return error;
  }
  return nullptr;
}

Error AllGather(const AllGatherParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  if (p.unit < 1) return "unit: expected 1 or more, got another number";
  const RankGroup* group = nullptr;
  if (Error error = FindRanks(p.communicator, &group)) return error;
  const int32_t size = group == nullptr ? 1 : group->size;
  const int64_t element_bytes = ElementBytes(p.dtype);
  int64_t borders[kMaxRanks + 1];
  // Of all columns and of each rank's: a unit of the copy divides them.
  int64_t divisor = p.num_columns * element_bytes;
  for (int32_t r = 0; r <= size; ++r) {
    borders[r] = HalvingBorder(p.num_columns, size, p.unit, r);
    divisor |= borders[r] * element_bytes;
  }
  const int32_t rank = group == nullptr ? 0 : group->rank;
  if (p.num_own != borders[rank + 1] - borders[rank])
    return "x: expected the columns of the rank's range, got another number of them";
  const void* const arrays[] = {p.x, p.y};
  return WithCopyUnit(divisor & -divisor, arrays, [&](auto unit) -> Error {
    using Unit = decltype(unit);
    GatheredPart part{0, 0, p.num_rows, {}};
    int64_t most = 0;
    for (int32_t r = 0; r <= size; ++r)
      part.columns[r] = borders[r] * element_bytes / static_cast<int64_t>(sizeof(Unit));
    for (int32_t r = 0; r < size; ++r) most = std::max(most, p.num_rows * part.Width(r));
    const int64_t step = part.most = StepOf(group, sizeof(Unit), most);
    for (; part.first < most; part.first += step) {
      Given<Unit> x{};
      if (Error error = Exchange(group, p.x, part.first, part.Count(rank), &x, stream)) return error;
      const LaunchShape shape{dim3(NumBlocks(std::min(step, most - part.first)), static_cast<unsigned>(size)),
                              dim3(kThreads)};
      if (Error error = Launch<PlaceColumnsKernel<Unit>>(shape, stream, part, size, x, DevicePtr<Unit>(p.y)))
        return error;
    }
    return nullptr;
  });
}

}  // namespace fdsd::cuda
