// Runs the experts of a rank's GPU for the rows of all: reads the rows where their homes have them, and writes the
// results there.
#include <algorithm>
#include <numeric>

#include "expert_gpu.h"
#include "linear_layout.h"
#include "moe_check.h"
#include "moe_parts.h"
#include "row_copy.h"
#include "runtime/status.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 256;

// Of a wave's pairs, one after another; all known to the host.
struct PairArrays {
  DevicePtr<int32_t> first;       // [S + 1] see RowGroups
  DevicePtr<int32_t> first_tile;  // [S + 1]
  DevicePtr<int32_t> sources;     // [pairs] the row that it reads, among those below
  DevicePtr<int32_t> slots;       // [pairs]
  DevicePtr<int32_t> places;      // [pairs] home * max_pairs + the home's pair
  DevicePtr<int32_t> rows;        // [pairs at most] home * capacity + the home's row

  static int64_t Count(int64_t num_slots, int64_t num_pairs) { return 2 * (num_slots + 1) + 4 * num_pairs; }
  PairArrays(DevicePtr<int32_t> ints, int64_t num_slots, int64_t num_pairs)
      : first(ints),
        first_tile(first + (num_slots + 1)),
        sources(first_tile + (num_slots + 1)),
        slots(sources + num_pairs),
        places(slots + num_pairs),
        rows(places + num_pairs) {}
};

// Block (row).
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads) void FetchRowsKernel(ExpertHomes homes, DevicePtr<const int32_t> rows,
                                                                int64_t num_units, DevicePtr<Unit> x) {
  const int64_t row = blockIdx.x;
  const int32_t source = rows[row];
  const char* const from = homes.memory[source / homes.capacity] + source % homes.capacity * homes.row_bytes;
  CopyRow<Unit>(DevicePtr<const Unit>(reinterpret_cast<const Unit*>(from)), x + row * num_units, num_units);
}

// Block (pair, part): kThreads neighbouring elements.
__global__ __launch_bounds__(kThreads) void SendResultsKernel(ExpertHomes homes, int32_t hidden_size,
                                                              DevicePtr<const int32_t> places,
                                                              DevicePtr<const int32_t> slots,
                                                              DevicePtr<const float> results,
                                                              DevicePtr<const float> bias) {
  const int32_t i = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= hidden_size) return;
  const int64_t pair = blockIdx.x;
  const int32_t place = places[pair];
  char* const memory = homes.memory[place / homes.max_pairs] + homes.results_at;
  const DevicePtr<float> to =
      DevicePtr<float>(reinterpret_cast<float*>(memory) + int64_t{place % homes.max_pairs} * hidden_size);
  float result = results[pair * hidden_size + i];
  if (bias != nullptr) result = result + bias[int64_t{slots[pair]} * hidden_size + i];
  to[i] = result;
}

// The weights of the first slot, which the others' follow in the order of the slots; an error where they do not.
Error WeightsOf(const RunExpertsParams& p, ExpertWeights* weights) {
  const ExpertShape& s = p.shape;
  const auto of_slot = [](const auto* data, int64_t slot, int64_t size) { return data - slot * size; };
  const auto bytes = [](int32_t in, int32_t out, LinearFormat format) {
    return PackedLinearBytes(in, out, format, PairProducts::kWhole);
  };
  const int64_t gate_up = bytes(s.hidden_size, 2 * s.intermediate_size, s.gate_up_format);
  const int64_t down = bytes(s.intermediate_size, s.hidden_size, s.down_format);
  bool is_found = false;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    if (p.first_pair[e] == p.first_pair[e + 1]) continue;
    ExpertWeights first = p.experts[e];
    first.gate_up = of_slot(static_cast<const char*>(first.gate_up), e, gate_up);
    first.down = of_slot(static_cast<const char*>(first.down), e, down);
    if (first.gate_up_bias != nullptr) first.gate_up_bias = of_slot(first.gate_up_bias, e, 2 * s.intermediate_size);
    if (first.down_bias != nullptr) first.down_bias = of_slot(first.down_bias, e, s.hidden_size);
    if (is_found && (first.gate_up != weights->gate_up || first.down != weights->down))
      return "experts: expected weights that lie in the order of the slots, got others";
    *weights = first;
    is_found = true;
  }
  return nullptr;
}

}  // namespace

// What a wave needs of the workspace.
struct ExpertGpu::Wave {
  Parts parts;
  void* ints;
  PairArrays pairs;
  void* x;
  PairProducts products;

  Wave(const ExpertShape& shape, int32_t num_slots, int32_t num_pairs, void* workspace)
      : parts(workspace),
        ints(parts.Take(PairArrays::Count(num_slots, num_pairs) * static_cast<int64_t>(sizeof(int32_t)))),
        pairs(DevicePtr<int32_t>(ints), num_slots, num_pairs),
        x(parts.Take(int64_t{num_pairs} * shape.hidden_size * ElementBytes(shape.dtype))),
        products(shape, num_pairs, &parts) {}

  Error Launch(const ExpertHomes& homes, int32_t num_slots, int32_t num_rows, const ExpertWeights& weights,
               Stream stream) const {
    const ExpertShape& shape = products.shape;
    const int64_t bytes = shape.hidden_size * ElementBytes(shape.dtype);
    const void* const places[] = {x};
    const Error error = WithCopyUnit(std::gcd(bytes, homes.row_bytes), places, [&](auto unit) {
      using Unit = decltype(unit);
      const LaunchShape rows{dim3(static_cast<unsigned>(num_rows)), dim3(kCopyThreads)};
      return cuda::Launch<FetchRowsKernel<Unit>>(rows, stream, homes, DevicePtr<const int32_t>(pairs.rows),
                                                 bytes / static_cast<int64_t>(sizeof(Unit)), DevicePtr<Unit>(x));
    });
    if (error != nullptr) return error;
    const RowGroups groups{num_slots,   products.num_pairs, products.TileRows(num_slots),
                           pairs.first, pairs.first_tile,   nullptr};
    if (Error failure = products.Run(groups, pairs.sources, weights, x, stream)) return failure;
    const auto num_parts = static_cast<unsigned>(DivideUp(shape.hidden_size, kThreads));
    const LaunchShape all{dim3(static_cast<unsigned>(products.num_pairs), num_parts), dim3(kThreads)};
    return cuda::Launch<SendResultsKernel>(
        all, stream, homes, shape.hidden_size, DevicePtr<const int32_t>(pairs.places),
        DevicePtr<const int32_t>(pairs.slots), DevicePtr<const float>(products.results),
        DevicePtr<const float>(weights.down_bias));
  }
};

int64_t ExpertGpu::WorkspaceBytes(const ExpertServiceShape& service, const ExpertShape& layer) {
  const int32_t most_pairs = ExpertSegment::CapacityOf(service) * service.top_k;
  return Wave(layer, service.num_slots, most_pairs, nullptr).parts.num_bytes();
}

Error ExpertGpu::AddLayer(const ExpertServiceLayerParams& p) {
  const ExpertServiceShape& s = segment_->shape();
  const ExpertShape& shape = p.shape;
  if (shape.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (shape.intermediate_size <= 0) return "intermediate_size: expected a positive number, got 0 or less";
  if (!(shape.gate_limit >= 0)) return "gate_limit: expected 0 (none) or a positive number, got another";
  for (const LinearFormat format : {shape.gate_up_format, shape.down_format})
    if (Error error = CheckLinear(shape.hidden_size, shape.intermediate_size, format, PairProducts::kWhole, nullptr))
      return error;
  const int64_t num_bytes = WorkspaceBytes(s, shape);
  if (num_bytes > workspace_bytes_) {
    if (workspace_ != nullptr) cudaFree(workspace_);
    workspace_ = nullptr;
    const auto size = static_cast<size_t>(num_bytes);
    if (Error error = TextOf(cudaMalloc(reinterpret_cast<void**>(&workspace_), size))) return error;
    workspace_bytes_ = num_bytes;
  }
  if (staging_ == nullptr) {
    const auto size = static_cast<size_t>(PairArrays::Count(s.num_slots, most_pairs())) * sizeof(int32_t);
    if (Error error = TextOf(cudaMallocHost(reinterpret_cast<void**>(&staging_), size))) return error;
  }
  layers_[static_cast<size_t>(p.layer)] = p;
  return LoadKernels(shape);
}

// A kernel that is launched for the first time may wait for all that runs, so for a pass that waits for this rank.
// Hence all are loaded now, by capturing them.
Error ExpertGpu::LoadKernels(const ExpertShape& shape) {
  if (Error error = TextOf(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal))) return error;
  Error refusal = nullptr;
  const int32_t num_slots = segment_->shape().num_slots;
  for (int32_t num_pairs = 1; refusal == nullptr; num_pairs = std::min(2 * num_pairs, most_pairs())) {
    const Wave wave(shape, num_slots, num_pairs, workspace_);
    refusal = wave.Launch(HomesNow(), num_slots, num_pairs, {}, stream_);
    if (num_pairs == most_pairs()) break;
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream_, &graph);
  cudaGraphExec_t made = nullptr;
  Error error = refusal != nullptr ? refusal : TextOf(status);
  if (error == nullptr) error = TextOf(cudaGraphInstantiate(&made, graph, 0));
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (made != nullptr) cudaGraphExecDestroy(made);
  return error;
}

ExpertHomes ExpertGpu::HomesNow() const {
  ExpertHomes homes{segment_->capacity(), segment_->max_pairs(), group_.row_bytes, bytes_.results_at, {}};
  for (size_t r = 0; r < homes_.size(); ++r) homes.memory[r] = homes_[r].memory;
  homes.memory[rank_] = own_;
  return homes;
}

// The pairs from `begin` to `end`; returns when their results have arrived.
Error ExpertGpu::RunWave(const RunExpertsParams& p, const ExpertWeights& weights, int32_t begin, int32_t end) {
  const int32_t num_pairs = end - begin;
  const int32_t num_slots = p.num_experts;
  const Wave wave(p.shape, num_slots, num_pairs, workspace_);
  int32_t* const first = staging_;
  int32_t* const first_tile = first + num_slots + 1;
  int32_t* const sources = first_tile + num_slots + 1;
  int32_t* const slots = sources + num_pairs;
  int32_t* const places = slots + num_pairs;
  int32_t* const rows = places + num_pairs;
  const int32_t tile_rows = wave.products.TileRows(num_slots);
  first_tile[0] = 0;
  for (int32_t s = 0; s <= num_slots; ++s) first[s] = std::clamp(p.first_pair[s], begin, end) - begin;
  for (int32_t s = 0; s < num_slots; ++s) {
    first_tile[s + 1] = first_tile[s] + static_cast<int32_t>(DivideUp(first[s + 1] - first[s], tile_rows));
    std::fill(slots + first[s], slots + first[s + 1], s);
  }
  std::copy(p.y_rows + begin, p.y_rows + end, places);
  int32_t num_rows = 0;
  for (int32_t i = 0; i < num_pairs; ++i) {
    int32_t& place = place_of_[static_cast<size_t>(p.x_rows[begin + i])];
    if (place < 0) {
      place = num_rows;
      rows[num_rows++] = p.x_rows[begin + i];
    }
    sources[i] = place;
  }
  for (int32_t i = 0; i < num_rows; ++i) place_of_[static_cast<size_t>(rows[i])] = -1;
  const auto num_bytes = static_cast<size_t>(PairArrays::Count(num_slots, num_pairs)) * sizeof(int32_t);
  if (Error error = TextOf(cudaMemcpyAsync(wave.ints, staging_, num_bytes, cudaMemcpyDefault, stream_))) return error;
  if (Error error = wave.Launch(HomesNow(), num_slots, num_rows, weights, stream_)) return error;
  return TextOf(cudaStreamSynchronize(stream_));
}

Error ExpertGpu::Run(const RunExpertsParams& p) {
  if (Error error = TextOf(cudaSetDevice(device_))) return error;  // of the thread that serves
  ExpertWeights weights{};
  if (Error error = WeightsOf(p, &weights)) return error;
  const int32_t num_pairs = p.first_pair[p.num_experts];
  for (int32_t begin = 0; begin < num_pairs; begin += most_pairs())
    if (Error error = RunWave(p, weights, begin, std::min(num_pairs, begin + most_pairs()))) return error;
  return nullptr;
}

}  // namespace fdsd::cuda
