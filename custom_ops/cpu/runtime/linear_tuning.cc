#include "linear_tuning.h"

#include <atomic>

namespace fdsd {
namespace {

constexpr int32_t kMaxBytes = 65536;
constexpr int32_t kMaxTileRows = 64;
constexpr int32_t kMaxBlockBytes = 1 << 30;

// Plus one, so that memory that begins as zeros says that nothing was measured.
std::atomic<int32_t> bytes_plus_one[kNumLinearFormats][kMaxPrefetchRows];
std::atomic<RowBlocking> blockings[kNumLinearFormats];
static_assert(std::atomic<RowBlocking>::is_always_lock_free);

bool IsKnown(LinearFormat format) {
  return static_cast<int>(format) >= 0 && static_cast<int>(format) < kNumLinearFormats;
}

}  // namespace

int32_t PrefetchBytes(LinearFormat format, int num_rows) {
  return bytes_plus_one[static_cast<int>(format)][num_rows - 1].load(std::memory_order_relaxed) - 1;
}

Error SetPrefetchBytes(LinearFormat format, int32_t num_rows, int32_t num_bytes) {
  if (!IsKnown(format)) return "format: expected a known one, got another";
  if (num_rows < 1 || num_rows > kMaxPrefetchRows) return "num_rows: expected 1..32, got another number";
  if (num_bytes < kNotMeasured || num_bytes > kMaxBytes) return "num_bytes: expected -1..65536, got another number";
  bytes_plus_one[static_cast<int>(format)][num_rows - 1].store(num_bytes + 1, std::memory_order_relaxed);
  return nullptr;
}

RowBlocking MeasuredBlocking(LinearFormat format) {
  return blockings[static_cast<int>(format)].load(std::memory_order_relaxed);
}

Error SetRowBlocking(LinearFormat format, RowBlocking blocking) {
  if (!IsKnown(format)) return "format: expected a known one, got another";
  if (blocking.tile_rows < 0 || blocking.tile_rows > kMaxTileRows)
    return "tile_rows: expected 0..64, got another number";
  if (blocking.block_bytes < 0 || blocking.block_bytes > kMaxBlockBytes) {
    return "block_bytes: expected 0..2^30, got another number";
  }
  blockings[static_cast<int>(format)].store(blocking, std::memory_order_relaxed);
  return nullptr;
}

}  // namespace fdsd
