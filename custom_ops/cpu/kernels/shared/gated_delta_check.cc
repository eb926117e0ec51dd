#include "gated_delta_check.h"

#include <cstring>

#include "scratch.h"

namespace fdsd {
namespace {

bool AreOffsetsUpTo(const int32_t* cu, int32_t count, int32_t most) {
  if (cu[0] != 0) return false;
  for (int32_t i = 0; i < count; ++i)
    if (cu[i + 1] < cu[i]) return false;
  return cu[count] <= most;
}

// What the steps of a request write and read, without regard to others.
Error CheckRequest(const GatedDeltaNetParams& p, int32_t r) {
  const auto& s = p.states;
  const int32_t num_rows = s.query_start_loc[r + 1] - s.query_start_loc[r];
  if (num_rows == 0) {
    return s.cu_snapshots[r] == s.cu_snapshots[r + 1]
               ? nullptr
               : "cu_snapshots: expected none of a request without rows, got one";
  }
  if (s.table_rows[r] < 0 || s.table_rows[r] >= p.num_table_rows)
    return "table_rows: expected rows of the request table, got one outside";
  const bool is_snapshot = s.source[r] >= p.num_table_rows && s.source[r] < p.num_slots;
  if (s.source[r] != -1 && s.source[r] != s.table_rows[r] && !is_snapshot)
    return "source: expected the request's own slot, a snapshot's or -1, got another";
  if (s.num_replayed[r] < 0 || s.num_replayed[r] > p.max_drafts)
    return "num_replayed: expected 0..max_drafts, got a number outside";
  if (s.num_certain[r] < 0 || s.num_certain[r] > num_rows)
    return "num_certain: expected 0 to the request's rows, got a number outside";
  if (num_rows - s.num_certain[r] > p.max_drafts)
    return "num_certain: expected at most max_drafts rows after the certain ones, got more";
  int32_t last = 0;
  for (int32_t i = s.cu_snapshots[r]; i < s.cu_snapshots[r + 1]; ++i) {
    if (s.snapshot_ends[i] <= last || s.snapshot_ends[i] > s.num_replayed[r] + num_rows)
      return "snapshot_ends: expected rising numbers in 1..replayed and new rows of the request, got another";
    if (s.snapshot_slots[i] < p.num_table_rows || s.snapshot_slots[i] >= p.num_slots)
      return "snapshot_slots: expected slots of snapshots, got one outside";
    last = s.snapshot_ends[i];
  }
  return nullptr;
}

// Whether a slot is written twice, or read by a request while another one writes it.
Error CheckSlots(const GatedDeltaNetParams& p) {
  const auto& s = p.states;
  auto* const is_written = ScratchArray<uint8_t>(Scratch::kOp, p.num_slots);
  std::memset(is_written, 0, static_cast<size_t>(p.num_slots));
  for (int32_t r = 0; r < p.num_requests; ++r) {
    if (s.query_start_loc[r] == s.query_start_loc[r + 1]) continue;
    if (is_written[s.table_rows[r]] != 0) return "table_rows: expected each row once, got one twice";
    is_written[s.table_rows[r]] = 1;
    for (int32_t i = s.cu_snapshots[r]; i < s.cu_snapshots[r + 1]; ++i) {
      if (is_written[s.snapshot_slots[i]] != 0) return "snapshot_slots: expected each slot once, got one twice";
      is_written[s.snapshot_slots[i]] = 1;
    }
  }
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const bool has_rows = s.query_start_loc[r] < s.query_start_loc[r + 1];
    if (has_rows && s.source[r] >= p.num_table_rows && is_written[s.source[r]] != 0)
      return "source: expected a snapshot that the step does not write, got one that it writes";
  }
  return nullptr;
}

}  // namespace

Error CheckGatedDeltaStates(const GatedDeltaNetParams& p) {
  if (!AreOffsetsUpTo(p.states.query_start_loc, p.num_requests, p.num_tokens))
    return "query_start_loc: expected 0 and rising offsets up to the rows of qkvz, got others";
  if (!AreOffsetsUpTo(p.states.cu_snapshots, p.num_requests, p.num_snapshots))
    return "cu_snapshots: expected 0 and rising offsets up to the number of snapshot_ends, got others";
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (const Error error = CheckRequest(p, r)) return error;
  return CheckSlots(p);
}

}  // namespace fdsd
