#pragma once
// The library's exported functions; what the bindings and ctypes call.
#include "fdsd/fdsd.h"

extern "C" {
#define FDSD_OP(Name, snake) fdsd::Error fdsd_##snake(const fdsd::Name##Params* p);
#include "fdsd/ops.def"
#undef FDSD_OP
int32_t fdsd_best_isa();
int32_t fdsd_current_isa();
fdsd::Error fdsd_set_isa(int32_t isa);
int32_t fdsd_num_threads();
fdsd::Error fdsd_set_num_threads(int32_t num_threads);
int64_t fdsd_packed_linear_bytes(int32_t in_features, int32_t out_features, int32_t format);
double fdsd_read_bandwidth(int64_t num_bytes, int32_t num_passes);
double fdsd_dot_peak(int32_t format, int32_t num_passes);
double fdsd_core_latency(int32_t num_passes);
double fdsd_philox_uniform(uint64_t seed, uint32_t position);
}
