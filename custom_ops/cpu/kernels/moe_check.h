#pragma once
// Argument checks that the ops of experts of all processors have in common.
#include "fdsd/moe.h"

namespace fdsd {

Error CheckRouter(const MoeFfnParams::Router& router, int32_t num_experts);

}  // namespace fdsd
