#include "fdsd/attention.h"

#include "attention_dot_float.h"
#include "attention_dot_int8.h"
#include "attention_tile.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// One call, over a cache of T with activations of Q.
template <typename Q, typename T>
class Call {
 public:
  explicit Call(const CascadeAppendAttentionParams& p)
      : p_(p),
        plan_(PlanAttention(p)),
        head_dim_(p.cache.head_dim),
        kept_(ScratchArray<float>(Scratch::kRows, plan_.num_partials * PartialSize(p.cache.head_dim))) {}

  void Run() const {
    ParallelFor(plan_.num_tasks, [&](int64_t i) { RunTask(TaskAt(plan_, i)); });
    ParallelFor(plan_.num_merges, [&](int64_t i) { RunMerge(MergeAt(plan_, i)); });
  }

 private:
  using Tile = HeadTile<Q, T>;

  // This thread's memory for the tile it works on.
  struct Memory {
    BlockScratch<T>* scratch;
    float* totals;  // [kMaxTileVectors] partial results
    float* partials;
  };

  Memory TaskMemory() const {
    const int64_t num_floats = kMaxTileVectors * PartialSize(head_dim_);
    auto* bytes = static_cast<char*>(
        ScratchBytes(Scratch::kTask, int64_t{sizeof(BlockScratch<T>)} + 2 * num_floats * int64_t{sizeof(float)}));
    auto* totals = reinterpret_cast<float*>(bytes + sizeof(BlockScratch<T>));
    return {reinterpret_cast<BlockScratch<T>*>(bytes), totals, totals + num_floats};
  }

  // Kept results of one part and KV head, from vector `vector` on.
  float* KeptAt(int32_t index, int32_t kv_head, int32_t part, int32_t vector) const {
    const KeptPartials& kept = plan_.kept[index];
    const int64_t row = static_cast<int64_t>(kv_head) * kept.num_parts + part;
    return kept_ + (kept.first + row * kept.num_vectors + vector) * PartialSize(head_dim_);
  }

  void MergeVectors(const Tile& tile, int first, float* partials, float* totals) const {
    for (int i = first; i < tile.num_vectors(); ++i) {
      Merge(PartialAt(partials, i, head_dim_), head_dim_, PartialAt(totals, i, head_dim_));
    }
  }

  // totals = totals and then the tile's partitions from `begin` on.
  void ComputeOnto(const Tile& tile, const AttentionTile& plan, int32_t begin, const Memory& memory,
                   float* totals) const {
    for (int32_t partition = begin; partition < plan.end_partition; ++partition) {
      tile.RunPartition(partition, memory.scratch, memory.partials);
      MergeVectors(tile, tile.FirstVector(partition), memory.partials, totals);
    }
  }

  void Finish(const Tile& tile, float* totals) const {
    for (int i = 0; i < tile.num_vectors(); ++i) tile.Finish(i, PartialAt(totals, i, head_dim_));
  }

  void RunTask(const AttentionTask& task) const {
    const AttentionTile& plan = *task.tile;
    const Tile tile(p_, plan, task.kv_head);
    const Memory memory = TaskMemory();
    if (task.partition >= 0) {
      const int32_t part = task.partition - plan.first_partition;
      tile.RunPartition(task.partition, memory.scratch, KeptAt(plan.kept, task.kv_head, part, plan.kept_vector));
      return;
    }
    float* totals = plan.kept < 0 ? memory.totals : KeptAt(plan.kept, task.kv_head, 0, plan.kept_vector);
    tile.RunPartition(plan.first_partition, memory.scratch, totals);
    ComputeOnto(tile, plan, plan.first_partition + 1, memory, totals);
    if (plan.kept < 0) Finish(tile, totals);
  }

  // The steps of a task without kept results, from what has been kept on.
  void RunMerge(const AttentionTask& merge) const {
    const AttentionTile& plan = *merge.tile;
    const Tile tile(p_, plan, merge.kv_head);
    float* totals = nullptr;
    const auto append = [&](int32_t kept, int32_t vector, bool is_own) {
      if (kept < 0) return;
      for (int32_t part = 0; part < plan_.kept[kept].num_parts; ++part) {
        float* partials = KeptAt(kept, merge.kv_head, part, vector);
        if (totals == nullptr) {
          totals = partials;
        } else {
          MergeVectors(tile, is_own ? tile.FirstVector(plan.first_partition + part) : 0, partials, totals);
        }
      }
    };
    append(plan.before, plan.before_vector, false);
    append(plan.kept, plan.kept_vector, true);
    if (plan.kept < 0) ComputeOnto(tile, plan, plan.first_partition, TaskMemory(), totals);
    Finish(tile, totals);
  }

  const CascadeAppendAttentionParams& p_;
  const AttentionPlan plan_;
  const int head_dim_;
  float* const kept_;
};

}  // namespace

Error CascadeAppendAttention(const CascadeAppendAttentionParams& p) {
  if (const Error error = CheckAttention(p); error != nullptr) return error;
  if (p.cache.kv_dtype == KvDType::kFloat32) {
    Call<float, float>(p).Run();
  } else if (p.cache.kv_dtype == KvDType::kBFloat16) {
    Call<bf16, bf16>(p).Run();
  } else if (p.cache.dtype == DType::kFloat32) {
    Call<float, int8_t>(p).Run();
  } else {
    Call<bf16, int8_t>(p).Run();
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
