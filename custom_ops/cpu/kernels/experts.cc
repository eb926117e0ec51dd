// Experts that ranks share. The service moves rows and pairs; everything that is computed happens here.
#include "fdsd/experts.h"

#include "expert_exchange.h"
#include "expert_sums.h"
#include "expert_wave.h"
#include "moe_check.h"
#include "moe_router.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// Put each token's experts in the order of their ids.
void SortExperts(int32_t top_k, int32_t* ids, float* weights) {
  for (int32_t i = 1; i < top_k; ++i) {
    for (int32_t k = i; k > 0 && ids[k] < ids[k - 1]; --k) {
      std::swap(ids[k], ids[k - 1]);
      std::swap(weights[k], weights[k - 1]);
    }
  }
}

// The tokens of a part.
struct Part {
  int64_t begin;
  int64_t end;
};
template <typename Params>
Part PartOf(const Params& p) {
  return {int64_t{p.num_tokens} * p.part / p.num_parts, int64_t{p.num_tokens} * (p.part + 1) / p.num_parts};
}

// What both ops require of the service.
template <typename Params>
Error CheckService(const Params& p, int32_t top_k, ExpertExchange** service, const ExpertServiceLayerParams** layer) {
  if (p.num_tokens < 0) return "num_tokens: expected 0 or more, got a negative number";
  if (p.num_parts < 1 || p.part < 0 || p.part >= p.num_parts) return "part: expected 0 to num_parts - 1, got another";
  if (p.service == 0) return nullptr;
  *service = FindExpertExchange(p.service);
  if (*service == nullptr) return "service: expected the handle of an open expert service, got another";
  if (const Error error = (*service)->FindLayer(p.layer, layer)) return error;
  if (p.hidden_size != (*layer)->shape.hidden_size) return "x: expected rows of the layer's hidden_size, got others";
  if (p.dtype != (*layer)->shape.dtype) return "x: expected the layer's dtype, got another";
  if (top_k != (*layer)->top_k) return "top_k: expected that of the layer, got another";
  return nullptr;
}

// Give the rows of a round, as many as fit, from `begin` on. Returns their end.
template <typename Params>
Error PostRound(const Params& p, ExpertExchange* service, int32_t top_k, int64_t begin, int64_t* end) {
  const int64_t last = PartOf(p).end;
  *end = std::min(last, begin + service->capacity());
  const int64_t row_bytes = p.hidden_size * ElementBytes(p.dtype);
  const ExpertRows rows{p.layer, static_cast<int32_t>(*end - begin), row_bytes,
                        static_cast<const char*>(p.x) + begin * row_bytes, p.expert_ids + begin * top_k};
  const Error error = service->Post(rows);
  if (error == nullptr && *end == last) service->LeaveLayer(p.layer);
  return error;
}

// Add up what the experts made of a token; `sums` is [slices, H].
template <typename T, typename Y>
void AddToken(const CombineExpertsParams& p, const ExpertExchange& exchange, int32_t num_experts, int64_t token,
              int64_t row, float* sums) {
  const auto border = [&](int32_t slice) { return HalvingBorder(num_experts, p.num_slices, 1, slice); };
  const int64_t size = p.hidden_size;
  std::memset(sums, 0, sizeof(float) * static_cast<size_t>(p.num_slices * size));
  for (int32_t k = 0; k < p.top_k; ++k) {
    const int64_t slice = SliceOf(p.expert_ids[token * p.top_k + k], p.num_slices, border);
    AddExpert(p.weights[token * p.top_k + k], exchange.Result(row, k), p.hidden_size, sums + slice * size);
  }
  const T* shared = p.shared == nullptr ? nullptr : static_cast<const T*>(p.shared) + token * size;
  StoreExperts(sums, p.num_slices, size, shared, p.hidden_size, static_cast<Y*>(p.y) + token * size);
}

// -0: x + -0 is x, also where x is -0.
template <typename Y>
void FillOtherParts(const CombineExpertsParams& p, const Part& part) {
  Y* const y = static_cast<Y*>(p.y);
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * p.hidden_size; i < end * p.hidden_size; ++i) {
      if constexpr (std::is_same_v<Y, float>) {
        y[i] = -0.0f;
      } else {
        y[i] = Y{0x8000};
      }
    }
  };
  fill(0, part.begin);
  fill(part.end, p.num_tokens);
}

}  // namespace

Error RunExperts(const RunExpertsParams& p) {
  if (p.shape.dtype == DType::kFloat16) return "dtype: expected float32 or bfloat16 on a processor, got float16";
  if (const Error error = CheckExperts(p.shape)) return error;
  if (p.num_experts < 0) return "num_experts: expected 0 or more, got a negative number";
  if (p.num_experts == 0) return nullptr;
  const int32_t num_pairs = p.first_pair[p.num_experts];
  int32_t most_pairs = 0;
  for (int32_t e = 0; e < p.num_experts; ++e) most_pairs = std::max(most_pairs, p.first_pair[e + 1] - p.first_pair[e]);
  Arena sizes(nullptr);
  ExpertBuffers(p, most_pairs, num_pairs, &sizes);
  Arena arena(ScratchArray<char>(Scratch::kOp, sizes.size()));
  const ExpertBuffers b(p, most_pairs, num_pairs, &arena);
  for (int32_t expert = 0; expert < p.num_experts && p.first_pair[expert] < num_pairs;) {
    ExpertWave(p, b, &expert).Run();
  }
  return nullptr;
}

Error DispatchExperts(const DispatchExpertsParams& p) {
  ExpertExchange* service = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (p.hidden_size <= 0) return "hidden_size: expected a positive number, got 0 or less";
  if (p.num_experts <= 0) return "num_experts: expected a positive number, got 0 or less";
  if (const Error error = CheckRouter(p.router, p.num_experts)) return error;
  if (const Error error = CheckService(p, p.router.top_k, &service, &layer)) return error;
  if (layer != nullptr && layer->num_experts != p.num_experts)
    return "router_weight: expected the layer's num_experts, got another number";
  if (service != nullptr && p.is_first != 0) {
    if (const Error error = service->BeginPass(p.layer)) return error;
  }
  const Part part = PartOf(p);
  const int64_t top_k = p.router.top_k;
  std::fill_n(p.expert_ids, p.num_tokens * top_k, -1);
  std::fill_n(p.weights, p.num_tokens * top_k, 0.0f);
  const char* const x = static_cast<const char*>(p.x) + part.begin * p.hidden_size * ElementBytes(p.dtype);
  const RouterInput input{
      static_cast<int32_t>(part.end - part.begin), p.hidden_size, p.num_experts, p.dtype, p.router, x};
  int32_t* const ids = p.expert_ids + part.begin * top_k;
  float* const weights = p.weights + part.begin * top_k;
  ChooseExperts(input, ids, weights, ScratchArray<char>(Scratch::kOp, RouterBytes(input)));
  for (int64_t i = 0; i < part.end - part.begin; ++i) SortExperts(p.router.top_k, ids + i * top_k, weights + i * top_k);
  int64_t end = 0;
  return service == nullptr ? nullptr : PostRound(p, service, p.router.top_k, part.begin, &end);
}

Error CombineExperts(const CombineExpertsParams& p) {
  ExpertExchange* service = nullptr;
  const ExpertServiceLayerParams* layer = nullptr;
  if (p.service == 0) return "service: expected the handle of an open expert service, got 0";
  if (p.num_slices != 1 && p.num_slices != 2 && p.num_slices != 4)
    return "num_slices: expected 1, 2 or 4, got another number";
  if (const Error error = CheckService(p, p.top_k, &service, &layer)) return error;
  const Part part = PartOf(p);
  for (int64_t begin = part.begin; begin < part.end;) {
    // The first round was posted by dispatch_experts.
    int64_t end = std::min(part.end, begin + service->capacity());
    if (begin > part.begin) {
      if (const Error error = PostRound(p, service, p.top_k, begin, &end)) return error;
    }
    if (const Error error = service->Await(p.layer, static_cast<int32_t>(end - begin))) return error;
    WithTypes(p.dtype, p.y_dtype, [&](auto t, auto y) {
      ParallelForRows(end - begin, 4 * p.hidden_size * (p.top_k + 1), [&](int64_t row) {
        float* const sums = ScratchArray<float>(Scratch::kTask, int64_t{p.num_slices} * p.hidden_size);
        AddToken<decltype(t), decltype(y)>(p, *service, layer->num_experts, begin + row, row, sums);
      });
    });
    begin = end;
  }
  if (p.y_dtype == DType::kFloat32) {
    FillOtherParts<float>(p, part);
  } else {
    FillOtherParts<bf16>(p, part);
  }
  if (p.is_last != 0) service->EndPass();
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
