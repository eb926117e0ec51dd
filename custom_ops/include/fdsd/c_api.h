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
}
