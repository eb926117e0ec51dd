#include "fdsd/attention.h"

#include "attention_dot_float.h"
#include "attention_dot_int8.h"
#include "attention_tile.h"
#include "fdsd/runtime.h"
#include "parallel_ranges.h"
#include "scratch_arrays.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

// One call, over a cache of T with activations of Q.
template <typename Q, typename T>
class Call {
 public:
  Call(const CascadeAppendAttentionParams& p, const AttentionPlan& plan)
      : p_(p),
        plan_(plan),
        head_dim_(p.cache.head_dim),
        amx_(AmxInUse()),
        prepared_(PrepareQueries()),
        kept_(ScratchArray<float>(Scratch::kRows, plan.num_partials * PartialSize(p.cache.head_dim))) {}

  void Run() const {
    ParallelRanges(plan_.num_units, plan_.units_per_run, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const AttentionRun run = RunAt(plan_, begin, end);
        if (run.num_heads > 0) RunTask(run);
        begin = run.end;
      }
      if (amx_ != nullptr) amx_->release();
    });
    RunMerges(0, plan_.num_trunk_merges);
    RunMerges(plan_.num_trunk_merges, plan_.num_merges);
  }

 private:
  using Tile = TileRun<Q, T>;
  using Query = typename Tile::Query;

  // This thread's memory for the run it works on.
  struct Memory {
    RunScratch<T>* scratch;
    float* totals;  // [kMaxRunVectors] partial results
    float* partials;
  };

  Memory TaskMemory() const {
    const int64_t num_floats = kMaxRunVectors * PartialSize(head_dim_);
    auto* bytes = static_cast<char*>(
        ScratchBytes(Scratch::kTask, int64_t{sizeof(RunScratch<T>)} + 2 * num_floats * int64_t{sizeof(float)}));
    auto* totals = reinterpret_cast<float*>(bytes + sizeof(RunScratch<T>));
    return {reinterpret_cast<RunScratch<T>*>(bytes), totals, totals + num_floats};
  }

  // All query vectors of the call, if they are not used as they are.
  const Query* PrepareQueries() const {
    if constexpr (!KvDot<T>::kPreparesQuery) {
      return nullptr;
    } else {
      using Element = typename KvDot<T>::Query;
      const int64_t count = static_cast<int64_t>(p_.num_tokens) * p_.num_heads;
      Query* queries = nullptr;
      Element* elements = nullptr;
      const auto take = [&](Arena arena) {
        elements = arena.Take<Element>(count * head_dim_);
        queries = arena.Take<Query>(count);
        return arena.size();
      };
      take(Arena(static_cast<char*>(ScratchBytes(Scratch::kOp, take(Arena(nullptr))))));
      ParallelForRows(count, head_dim_ * int64_t{sizeof(float)}, [&](int64_t i) {
        const Q* q = static_cast<const Q*>(p_.q) + i * head_dim_;
        queries[i] = KvDot<T>::PrepareQuery(q, head_dim_, p_.scores.scale * kLog2E, elements + i * head_dim_);
      });
      return queries;
    }
  }

  void RunMerges(int64_t first, int64_t last) const {
    if (first == last) return;
    ParallelRanges(last - first, MergesPerRun(last - first), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const AttentionRun run = MergesAt(plan_, first + begin, first + end);
        RunMerge(run);
        begin = run.end - first;
      }
      if (amx_ != nullptr && plan_.computes_in_merges) amx_->release();
    });
  }

  // Of so many: few small ones stay on the calling thread, unless they compute partitions too.
  int64_t MergesPerRun(int64_t count) const {
    const int64_t share = (count + NumThreads() - 1) / NumThreads();
    if (plan_.computes_in_merges) return share;
    const int64_t bytes = plan_.num_partials * PartialSize(head_dim_) * int64_t{sizeof(float)} / plan_.num_merges;
    return std::max(share, kRowTaskBytes / std::max<int64_t>(bytes, 1));
  }

  // Kept results over one part, from the run's first head and vector `vector` on.
  RunPartials KeptAt(const KeptVectors& vectors, int32_t first_head, int32_t part) const {
    const KeptPartials& kept = plan_.kept[vectors.index];
    const int64_t row = static_cast<int64_t>(part) * plan_.num_groups + first_head;
    return {kept_ + (kept.first + row * kept.num_vectors + vectors.first) * PartialSize(head_dim_), kept.num_vectors};
  }

  // totals = totals and then the tile's partitions from `begin` on.
  void ComputeOnto(const Tile& tile, const AttentionTile& plan, int32_t begin, const Memory& memory,
                   const RunPartials& totals) const {
    const RunPartials partials{memory.partials, tile.num_vectors()};
    for (int32_t partition = begin; partition < plan.end_partition; ++partition) {
      tile.RunPartition(partition, memory.scratch, partials);
      tile.MergePartition(partition, partials, totals);
    }
  }

  void RunTask(const AttentionRun& run) const {
    const AttentionTile& plan = *run.tile;
    const Tile tile(p_, run, prepared_, amx_);
    const Memory memory = TaskMemory();
    if (run.partition >= 0) {
      const int32_t part = run.partition - plan.first_partition;
      tile.RunPartition(run.partition, memory.scratch, KeptAt(plan.kept, run.first_head, part));
      return;
    }
    const bool is_finished = plan.kept.index < 0;
    const RunPartials totals =
        is_finished ? RunPartials{memory.totals, tile.num_vectors()} : KeptAt(plan.kept, run.first_head, 0);
    tile.RunPartition(plan.first_partition, memory.scratch, totals);
    ComputeOnto(tile, plan, plan.first_partition + 1, memory, totals);
    if (is_finished) tile.Finish(totals);
  }

  // The steps of a task without kept results, from what has been kept on.
  void RunMerge(const AttentionRun& merge) const {
    const AttentionTile& plan = *merge.tile;
    const Tile tile(p_, merge, prepared_, plan.kept.index < 0 ? amx_ : nullptr);
    RunPartials totals{nullptr, 0};
    const auto append = [&](const KeptVectors& vectors, bool is_own) {
      if (vectors.index < 0) return;
      const int32_t num_parts = vectors.is_merged ? 1 : plan_.kept[vectors.index].num_parts;
      for (int32_t part = 0; part < num_parts; ++part) {
        const RunPartials partials = KeptAt(vectors, merge.first_head, part);
        if (totals.base == nullptr) {
          totals = partials;
        } else if (is_own) {
          tile.MergePartition(plan.first_partition + part, partials, totals);
        } else {
          tile.MergePartials(partials, totals);
        }
      }
    };
    append(plan.before, false);
    append(plan.kept, true);
    if (plan.kept.index < 0) ComputeOnto(tile, plan, plan.first_partition, TaskMemory(), totals);
    if (!plan.is_common) tile.Finish(totals);
  }

  const CascadeAppendAttentionParams& p_;
  const AttentionPlan& plan_;
  const int head_dim_;
  const AmxAttention* const amx_;  // nullptr: vector instructions multiply
  const Query* const prepared_;
  float* const kept_;
};

}  // namespace

const AmxAttention* AmxInUse() {
#if defined(FDSD_SIMD_AVX512)
  switch (TilesInUse()) {
    case Tiles::kChip:
      return &amx::kAmxAttention;
    case Tiles::kTwin:
      return &amx_twin::kAmxAttention;
    case Tiles::kNone:
      break;
  }
#endif
  return nullptr;
}

Error FindSharedPrefixes(const FindSharedPrefixesParams& p) { return FindGroupsOfRequests(p); }

Error CascadeAppendAttention(const CascadeAppendAttentionParams& p) {
  if (const Error error = CheckAttention(p); error != nullptr) return error;
  AttentionPlan plan;
  if (const Error error = PlanAttention(p, &plan); error != nullptr) return error;
  if (p.cache.kv_dtype == KvDType::kFloat32) {
    Call<float, float>(p, plan).Run();
  } else if (p.cache.kv_dtype == KvDType::kBFloat16) {
    Call<bf16, bf16>(p, plan).Run();
  } else if (p.cache.dtype == DType::kFloat32) {
    Call<float, int8_t>(p, plan).Run();
  } else {
    Call<bf16, int8_t>(p, plan).Run();
  }
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
