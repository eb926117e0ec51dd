#pragma once
// Which rows have the adapter of which slot, and the tasks that they make.
#include <algorithm>
#include <cstring>

#include "fdsd/lora.h"
#include "linear_layout.h"
#include "scratch_arrays.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {

// Rows of a task.
constexpr int32_t kTaskRows = 32;

// The rows of every slot, in order, and the tasks that they make.
struct SlotRows {
  int32_t num_slots;
  int32_t* first;       // [S + 1] the rows of slot s are rows[first[s]] .. rows[first[s + 1] - 1]
  int32_t* rows;        // [T]
  int32_t* first_task;  // [S + 1] and its tasks, which are blocks of columns within chunks of kTaskRows rows

  SlotRows(int32_t slots, int32_t num_rows, Arena* arena)
      : num_slots(slots),
        first(arena->Take<int32_t>(slots + int64_t{1})),
        rows(arena->Take<int32_t>(num_rows)),
        first_task(arena->Take<int32_t>(slots + int64_t{1})) {}

  void Sort(const int32_t* slot_of, int32_t num_rows, int32_t num_blocks) const {
    std::memset(first, 0, sizeof(int32_t) * (static_cast<size_t>(num_slots) + 1));
    for (int32_t t = 0; t < num_rows; ++t)
      if (slot_of[t] >= 0) ++first[slot_of[t] + 1];
    first_task[0] = 0;
    for (int32_t s = 0; s < num_slots; ++s) {
      first_task[s + 1] = first_task[s] + static_cast<int32_t>(DivideUp(first[s + 1], kTaskRows)) * num_blocks;
      first[s + 1] += first[s];
    }
    // Each slot's begin moves on to its end while its rows are placed, and then back.
    for (int32_t t = 0; t < num_rows; ++t)
      if (slot_of[t] >= 0) rows[first[slot_of[t]]++] = t;
    for (int32_t s = num_slots; s > 0; --s) first[s] = first[s - 1];
    first[0] = 0;
  }

  struct Task {
    int32_t slot;
    int32_t block;
    const int32_t* rows;
    int32_t num_rows;
  };
  Task TaskOf(int64_t number, int32_t num_blocks) const {
    int32_t slot = 0;
    while (number >= first_task[slot + 1]) ++slot;
    const auto within = static_cast<int32_t>(number - first_task[slot]);
    const int32_t begin = first[slot] + within / num_blocks * kTaskRows;
    return {slot, within % num_blocks, rows + begin, std::min(kTaskRows, first[slot + 1] - begin)};
  }
};

inline Error CheckSlots(const int32_t* slots, int32_t num_rows, int32_t num_slots, bool* has_adapters) {
  *has_adapters = false;
  for (int32_t t = 0; t < num_rows; ++t) {
    if (slots[t] < -1 || slots[t] >= num_slots) return "slots: expected -1 or one of the adapters' slots, got another";
    *has_adapters |= slots[t] >= 0;
  }
  return nullptr;
}

inline Error CheckRanks(const int32_t* ranks, int64_t count, int32_t max_rank) {
  for (int64_t i = 0; i < count; ++i)
    if (ranks[i] < 0 || ranks[i] > max_rank) return "ranks: expected 0..max_rank, got a number outside";
  return nullptr;
}

// Runs task(SlotRows::Task) for all rows that have an adapter, on all threads.
template <typename Task>
void ForSlots(const int32_t* slots, int32_t num_rows, int32_t num_slots, int32_t num_blocks, Task&& task) {
  Arena sizes(nullptr);
  SlotRows(num_slots, num_rows, &sizes);
  Arena arena(ScratchArray<char>(Scratch::kOp, sizes.size()));
  const SlotRows of_slots(num_slots, num_rows, &arena);
  of_slots.Sort(slots, num_rows, num_blocks);
  ParallelFor(of_slots.first_task[num_slots], [&](int64_t i) { task(of_slots.TaskOf(i, num_blocks)); });
}

}  // namespace FDSD_ISA
}  // namespace fdsd
