#include <array>
#include <cstring>

#include "../bindings/c_api.h"
#include "expert_gpu.h"
#include "peer_words.h"
#include "runtime/status.h"

FDSD_EXPORT int64_t fdsd_cuda_share_block_bytes();

namespace fdsd::cuda {
namespace {

constexpr int32_t kMaxServices = 256;
std::array<std::atomic<ExpertGpu*>, kMaxServices> gpus;
constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

ExpertRunner RunnerOf(ExpertGpu* gpu) {
  return {gpu, [](void* self, const ExpertServiceLayerParams& p) { return static_cast<ExpertGpu*>(self)->AddLayer(p); },
          [](void* self, int32_t home) { return static_cast<ExpertGpu*>(self)->Reaches(home); },
          [](void* self, const RunExpertsParams& p) { return static_cast<ExpertGpu*>(self)->Run(p); }};
}

}  // namespace

ExpertGpu* FindExpertGpu(int32_t service) {
  return service >= 1 && service <= kMaxServices ? gpus[static_cast<size_t>(service - 1)].load() : nullptr;
}

ExpertGpuBytes::ExpertGpuBytes(const ExpertServiceShape& s) {
  const int64_t capacity = ExpertSegment::CapacityOf(s);
  // CUDA shares the blocks whole that it has memory from.
  const int64_t block = fdsd_cuda_share_block_bytes();
  results_at = Aligned(capacity * s.row_bytes);
  shared = (results_at + int64_t{4} * capacity * s.top_k * s.hidden_size + block - 1) / block * block;
  pairs = Aligned(int64_t{4} * capacity * s.top_k);
  versions = Aligned(int64_t{8} * s.num_layers);
  table = Aligned(int64_t{4} * s.num_layers * s.num_experts * s.num_ranks);
}

ExpertGpu::ExpertGpu(const ExpertServiceOpenParams& p, std::unique_ptr<ExpertSegment> segment)
    : segment_(std::move(segment)),
      rank_(p.rank),
      bytes_(p.shape),
      runner_(RunnerOf(this)),
      layers_(static_cast<size_t>(p.shape.num_layers)),
      homes_(static_cast<size_t>(p.shape.num_ranks)),
      place_of_(static_cast<size_t>(p.shape.num_ranks) * static_cast<size_t>(segment_->capacity()), -1) {
  group_.rank = rank_;
  group_.num_ranks = p.shape.num_ranks;
  group_.num_slots = p.shape.num_slots;
  group_.num_experts = p.shape.num_experts;
  group_.capacity = segment_->capacity();
  group_.row_bytes = p.shape.row_bytes;
  group_.timeout_ns = static_cast<uint64_t>(p.timeout_s * 1e9);
}

Error ExpertGpu::OpenSegment(ExpertStatus* status) {
  if (Error error = TextOf(cudaGetDevice(&device_))) return error;
  int least = 0;
  int greatest = 0;
  if (Error error = TextOf(cudaDeviceGetStreamPriorityRange(&least, &greatest))) return error;
  if (Error error = TextOf(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest))) return error;
  const auto control_bytes = static_cast<size_t>(segment_->control_bytes());
  if (Error error = TextOf(cudaHostRegister(segment_->data(), control_bytes, cudaHostRegisterMapped))) return error;
  is_registered_ = true;
  void* mapped = nullptr;
  if (Error error = TextOf(cudaHostGetDevicePointer(&mapped, segment_->data(), 0))) return error;
  const auto take = [](char** memory, int64_t num_bytes) {
    return TextOf(cudaMalloc(reinterpret_cast<void**>(memory), static_cast<size_t>(num_bytes)));
  };
  if (Error error = take(&own_, bytes_.shared)) return error;
  if (Error error = take(&private_, bytes_.of_rank())) return error;

  ExpertJob& job = segment_->job(rank_);
  const auto on_gpu = [&](const auto* of_host) {
    return static_cast<char*>(mapped) + (reinterpret_cast<const char*>(of_host) - segment_->data());
  };
  group_.seq = reinterpret_cast<uint64_t*>(on_gpu(&job.seq));
  group_.layer = reinterpret_cast<int32_t*>(on_gpu(&job.layer));
  group_.num_rows = reinterpret_cast<int32_t*>(on_gpu(&job.num_rows));
  group_.first_pair = reinterpret_cast<int32_t*>(on_gpu(job.first_pair));
  group_.pairs = reinterpret_cast<int32_t*>(on_gpu(segment_->pairs(rank_)));
  group_.done = on_gpu(job.done);
  group_.is_draining = reinterpret_cast<int32_t*>(on_gpu(&segment_->rank(rank_).is_draining));
  group_.states = on_gpu(&segment_->rank(0).state);
  group_.counts = reinterpret_cast<int64_t*>(on_gpu(segment_->counts(rank_, 0)));
  group_.version = reinterpret_cast<uint64_t*>(on_gpu(&segment_->version()));
  group_.table = reinterpret_cast<int32_t*>(on_gpu(segment_->slots(0)));
  group_.job_version = reinterpret_cast<uint64_t*>(on_gpu(&job.version));
  group_.rows = own_;
  group_.results = reinterpret_cast<float*>(own_ + bytes_.results_at);
  group_.pair_of = reinterpret_cast<int32_t*>(private_);
  group_.read_versions = reinterpret_cast<uint64_t*>(private_ + bytes_.pairs);
  group_.slot_of = reinterpret_cast<int32_t*>(private_ + bytes_.pairs + bytes_.versions);
  group_.state = reinterpret_cast<ExpertState*>(private_ + bytes_.pairs + bytes_.versions + bytes_.table);
  group_.status = status;
  // An earlier incarnation may have published a job that others still run.
  const ExpertState begin{job.seq.load(), 0, 0, {}};
  const auto num_private = static_cast<size_t>(bytes_.of_rank());
  if (Error error = TextOf(cudaMemsetAsync(private_, 0, num_private, nullptr))) return error;
  if (Error error = TextOf(cudaMemcpy(group_.state, &begin, sizeof(begin), cudaMemcpyDefault))) return error;
  if (Error error = TextOf(cudaStreamSynchronize(nullptr))) return error;

  cudaIpcMemHandle_t handle;
  static_assert(sizeof(handle) == kMemoryHandleBytes);
  if (Error error = TextOf(cudaIpcGetMemHandle(&handle, own_))) return error;
  ExpertRank& own = segment_->rank(rank_);
  std::memcpy(own.memory, &handle, sizeof(handle));
  own.memory_incarnation.store(own.incarnation.load());
  return nullptr;
}

Error ExpertGpu::Open(const ExpertServiceOpenParams& p, ExpertStatus* status, std::unique_ptr<ExpertGpu>* gpu) {
  std::unique_ptr<ExpertSegment> segment;
  if (Error error = ExpertSegment::Open(p.file, p.shape, &segment)) return error;
  gpu->reset(new ExpertGpu(p, std::move(segment)));
  return (*gpu)->OpenSegment(status);
}

ExpertGpu::~ExpertGpu() {
  for (const Home& home : homes_)
    if (home.memory != nullptr) retired_.push_back(home.memory);
  for (char* memory : retired_) cudaIpcCloseMemHandle(memory);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  for (char* memory : {own_, private_, workspace_})
    if (memory != nullptr) cudaFree(memory);
  if (staging_ != nullptr) cudaFreeHost(staging_);
  if (is_registered_) cudaHostUnregister(segment_->data());
}

Error ExpertGpu::FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const {
  if (layer < 0 || layer >= segment_->shape().num_layers || layers_[static_cast<size_t>(layer)].num_experts == 0)
    return "layer: expected a layer of the service, got another";
  *found = &layers_[static_cast<size_t>(layer)];
  return nullptr;
}

bool ExpertGpu::Reaches(int32_t home) {
  if (home == rank_) return true;
  Home& found = homes_[static_cast<size_t>(home)];
  const ExpertRank& other = segment_->rank(home);
  const int32_t incarnation = other.memory_incarnation.load();
  if (incarnation == 0) return false;
  if (found.incarnation == incarnation) return true;
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, other.memory, sizeof(handle));
  void* memory = nullptr;
  if (cudaSetDevice(device_) != cudaSuccess) return false;
  if (other.memory_incarnation.load() != incarnation) return false;
  if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return false;
  if (found.memory != nullptr) retired_.push_back(found.memory);
  found = {incarnation, static_cast<char*>(memory)};
  return true;
}

}  // namespace fdsd::cuda

// Run a rank's experts on the calling thread's GPU.
//   p                what its service was opened with; `service` points to its handle
//   status           an ExpertStatus, zeros, of pinned memory by the GPU's address
//   runner           receives what the service takes as its runner
FDSD_EXPORT fdsd::Error fdsd_cuda_open_experts(const fdsd::ExpertServiceOpenParams* p, void* status, void** runner) {
  using namespace fdsd::cuda;
  std::unique_ptr<ExpertGpu> gpu;
  if (*p->service < 1 || *p->service > kMaxServices) return "service: expected the handle of an open one, got another";
  if (fdsd::Error error = ExpertGpu::Open(*p, static_cast<ExpertStatus*>(status), &gpu)) return error;
  *runner = const_cast<fdsd::ExpertRunner*>(&gpu->runner());
  delete gpus[static_cast<size_t>(*p->service - 1)].exchange(gpu.release());
  return nullptr;
}

// Returns what a rank takes of its GPU's memory besides its experts, where this is the layer that needs most.
FDSD_EXPORT int64_t fdsd_cuda_expert_bytes(const fdsd::ExpertServiceOpenParams* p,
                                           const fdsd::ExpertServiceLayerParams* layer) {
  const fdsd::cuda::ExpertGpuBytes bytes(p->shape);
  return bytes.shared + bytes.of_rank() + fdsd::cuda::ExpertGpu::WorkspaceBytes(p->shape, layer->shape);
}

// Nothing of it may be under way, and its service is closed.
FDSD_EXPORT void fdsd_cuda_close_experts(int32_t service) {
  if (fdsd::cuda::FindExpertGpu(service) != nullptr)
    delete fdsd::cuda::gpus[static_cast<size_t>(service - 1)].exchange(nullptr);
}

// Let passes wait again, after those that have failed.
FDSD_EXPORT fdsd::Error fdsd_cuda_clear_experts(int32_t service, void* stream) {
  const fdsd::cuda::ExpertGpu* const gpu = fdsd::cuda::FindExpertGpu(service);
  if (gpu == nullptr) return "service: expected one on a GPU, got another";
  uint64_t* const failed = &gpu->group().state->failed;
  return fdsd::cuda::TextOf(cudaMemsetAsync(failed, 0, sizeof(*failed), static_cast<cudaStream_t>(stream)));
}
