// C functions over the same params structs: ctypes, tests and tools need no framework.
#include "c_api.h"

#include "amx/product.h"
#include "bandwidth.h"
#include "declarations.inc"
#include "dot_peak.h"
#include "linear_layout.h"
#include "linear_tuning.h"

#define FDSD_OP(Name, snake) \
  FDSD_EXPORT fdsd::Error fdsd_##snake(const fdsd::Name##Params* p) { return fdsd::Name(*p); }
#include "declarations.inc"
#undef FDSD_OP

FDSD_EXPORT int32_t fdsd_best_isa() { return static_cast<int32_t>(fdsd::BestIsa()); }
FDSD_EXPORT int32_t fdsd_current_isa() { return static_cast<int32_t>(fdsd::CurrentIsa()); }
FDSD_EXPORT fdsd::Error fdsd_set_isa(int32_t isa) {
  if (isa < 0 || isa > 3) return "isa: expected 0 (scalar), 1 (avx2), 2 (avx512) or 3 (amx)";
  return fdsd::SetIsa(static_cast<fdsd::Isa>(isa));
}
FDSD_EXPORT fdsd::Error fdsd_amx_refusal() { return fdsd::AmxRefusal(); }
FDSD_EXPORT fdsd::Error fdsd_assume_tiles(int32_t tiles) {
  if (tiles < 0 || tiles > 2) return "tiles: expected 0 (none), 1 (chip) or 2 (twin)";
  return fdsd::AssumeTiles(static_cast<fdsd::Tiles>(tiles));
}
// One product on tiles, of the chip (1) or emulated (2), whatever level is in use: for tests.
FDSD_EXPORT fdsd::Error fdsd_add_tile_product(int32_t tiles, int32_t product, int32_t rows, const void* a,
                                              const void* b, void* c) {
  if (product < 0 || product > 4) return "product: expected 0..4, got another number";
  const auto known_product = static_cast<fdsd::TileProduct>(product);
  if (static_cast<fdsd::Tiles>(tiles) == fdsd::Tiles::kTwin) {
    return fdsd::avx512::amx_twin::AddTileProduct(known_product, rows, a, b, c);
  }
  if (const fdsd::Error refusal = fdsd::ChipRefusal()) return refusal;
  return fdsd::avx512::amx::AddTileProduct(known_product, rows, a, b, c);
}
FDSD_EXPORT int32_t fdsd_num_threads() { return fdsd::NumThreads(); }
FDSD_EXPORT fdsd::Error fdsd_set_num_threads(int32_t num_threads, int32_t num_processors) {
  return fdsd::SetNumThreads(num_threads, num_processors);
}
FDSD_EXPORT fdsd::Error fdsd_set_prefetch_bytes(int32_t format, int32_t num_rows, int32_t num_bytes) {
  return fdsd::SetPrefetchBytes(static_cast<fdsd::LinearFormat>(format), num_rows, num_bytes);
}
FDSD_EXPORT fdsd::Error fdsd_set_row_blocking(int32_t format, int32_t tile_rows, int32_t block_bytes) {
  return fdsd::SetRowBlocking(static_cast<fdsd::LinearFormat>(format), {tile_rows, block_bytes});
}
FDSD_EXPORT void fdsd_thread_counts(int64_t* num_jobs, int64_t* of_threads) {
  fdsd::ThreadCounts(num_jobs, of_threads);
}
FDSD_EXPORT int64_t fdsd_packed_linear_bytes(int32_t in_features, int32_t out_features, int32_t format,
                                             int32_t num_slices, int32_t slice_unit) {
  const auto known_format = static_cast<fdsd::LinearFormat>(format);
  const fdsd::SliceRule slices{num_slices, slice_unit};
  if (fdsd::CheckLinear(in_features, out_features, known_format, slices, nullptr) != nullptr) return 0;
  return fdsd::PackedLinearBytes(in_features, out_features, known_format, slices);
}
FDSD_EXPORT int64_t fdsd_halving_border(int64_t size, int32_t count, int64_t unit, int32_t index) {
  return fdsd::HalvingBorder(size, count, unit, index);
}
FDSD_EXPORT double fdsd_read_bandwidth(int64_t num_bytes, int32_t num_passes) {
  return fdsd::ReadBandwidth(num_bytes, num_passes);
}
FDSD_EXPORT double fdsd_dot_peak(int32_t format, int32_t num_passes) {
  return fdsd::DotPeak(static_cast<fdsd::LinearFormat>(format), num_passes);
}
FDSD_EXPORT double fdsd_core_latency(int32_t num_passes) { return fdsd::CoreLatency(num_passes); }
FDSD_EXPORT double fdsd_philox_uniform(uint64_t seed, uint32_t position) { return fdsd::PhiloxUniform(seed, position); }
