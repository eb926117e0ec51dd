#pragma once
// Whether processor and system let this process use AMX tiles.
#include "fdsd/status.h"

namespace fdsd {

// Why not, nullptr if they do. The first call asks the system for permission, which the process keeps: all its threads,
// and processes it forks. The text begins with "the system" where the processor has AMX.
Error TileRefusal();

}  // namespace fdsd
