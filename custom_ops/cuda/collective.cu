// Sums of several GPUs' values. A rank copies its own into a buffer that the others can read, the ranks meet, and each
// adds all of them in the tree of ranks: every rank the same, so all have the same bits, which are the CPU's.
#include <algorithm>

#include "communicator.h"
#include "fdsd/collective.h"
#include "numbers.h"
#include "ops.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;
// Elements of a thread: neighbours of other threads', so that a warp reads whole lines.
constexpr int kEach = 4;

// Elements [first, first + count) of [T, H].
struct SummedPart {
  int64_t first;
  int64_t count;
  int32_t num_columns;
};

struct SummedArrays {
  DevicePtr<const float> bias;  // nullptr = none
  DevicePtr<const float> ranks[kMaxRanks];
  DevicePtr<const uint32_t> epoch;  // nullptr: a rank's values are where `ranks` points; else in the epoch's buffer
  int64_t buffer_floats;
};

// Block: kThreads * kEach neighbouring elements.
__global__ __launch_bounds__(kThreads) void PublishKernel(int64_t count, DevicePtr<const float> x,
                                                          DevicePtr<const uint32_t> epoch, DevicePtr<float> buffers,
                                                          int64_t buffer_floats) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  // The exchange that this one is becomes the epoch when the ranks meet.
  const DevicePtr<float> buffer = buffers + BufferOffset(epoch[0] + 1, buffer_floats);
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i < count) buffer[i] = x[i];
  }
}

// The same elements of every rank, added in their tree.
template <int kRanks>
__device__ __forceinline__ float AddRanks(const SummedArrays& a, int first_rank, int64_t i) {
  if constexpr (kRanks == 1) {
    return a.ranks[first_rank][i];
  } else {
    const float left = AddRanks<kRanks / 2>(a, first_rank, i);
    return left + AddRanks<kRanks / 2>(a, first_rank + kRanks / 2, i);
  }
}

template <int kRanks, typename T>
__global__ __launch_bounds__(kThreads) void AddRanksKernel(SummedPart part, SummedArrays a, DevicePtr<const T> shared,
                                                           DevicePtr<T> y) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  const int64_t offset = a.epoch == nullptr ? 0 : BufferOffset(a.epoch[0], a.buffer_floats);
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i >= part.count) return;
    const int64_t at = part.first + i;
    float sum = AddRanks<kRanks>(a, 0, offset + i);
    if (!(a.bias == nullptr)) sum = sum + a.bias[at % part.num_columns];
    if (!(shared == nullptr)) sum = sum + LoadFloat<T>(shared, at);
    y[at] = FromFloat<T>(sum);
  }
}

template <int kRanks>
Error AddPart(const AllReduceParams& p, const SummedPart& part, const SummedArrays& arrays, Stream stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(part.count, kThreads * kEach))), dim3(kThreads)};
  if (p.y_dtype == DType::kFloat32)
    return Launch<AddRanksKernel<kRanks, float>>(shape, stream, part, arrays, DevicePtr<const float>(p.shared),
                                                 DevicePtr<float>(p.y));
  return Launch<AddRanksKernel<kRanks, bf16>>(shape, stream, part, arrays, DevicePtr<const bf16>(p.shared),
                                              DevicePtr<bf16>(p.y));
}

Error Exchange(const AllReduceParams& p, const RankGroup& group, const SummedPart& part, SummedArrays arrays,
               Stream stream) {
  const auto epoch = DevicePtr<const uint32_t>(&group.signals[group.rank]->epoch);
  const int64_t buffer_floats = group.buffer_bytes / static_cast<int64_t>(sizeof(float));
  const LaunchShape shape{dim3(static_cast<unsigned>(DivideUp(part.count, kThreads * kEach))), dim3(kThreads)};
  const auto x = DevicePtr<const float>(p.x + part.first);
  const auto own = DevicePtr<float>(group.buffers[group.rank]);
  if (Error error = Launch<PublishKernel>(shape, stream, part.count, x, epoch, own, buffer_floats)) return error;
  if (Error error = MeetRanks(group, stream)) return error;
  arrays.epoch = epoch;
  arrays.buffer_floats = buffer_floats;
  for (int32_t r = 0; r < group.size; ++r) arrays.ranks[r] = DevicePtr<const float>(group.buffers[r]);
  return group.size == 2 ? AddPart<2>(p, part, arrays, stream) : AddPart<kMaxRanks>(p, part, arrays, stream);
}

}  // namespace

Error AllReduce(const AllReduceParams& p, Stream stream) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  const int64_t count = static_cast<int64_t>(p.num_rows) * p.num_columns;
  SummedArrays arrays{DevicePtr<const float>(p.bias), {}, nullptr, 0};
  if (p.communicator == 0) {
    arrays.ranks[0] = DevicePtr<const float>(p.x);
    return AddPart<1>(p, SummedPart{0, count, p.num_columns}, arrays, stream);
  }
  const RankGroup* const group = FindRankGroup(p.communicator);
  if (group == nullptr) return "communicator: expected 0 or an open one, got another";
  const int64_t step = group->buffer_bytes / static_cast<int64_t>(sizeof(float));
  for (int64_t first = 0; first < count; first += step) {
    const SummedPart part{first, std::min(step, count - first), p.num_columns};
    if (Error error = Exchange(p, *group, part, arrays, stream)) return error;
  }
  return nullptr;
}

}  // namespace fdsd::cuda
