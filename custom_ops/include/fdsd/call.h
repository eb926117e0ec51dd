#pragma once
// Functions of objects with state, which C callers reach by name as they do ops.
#include "fdsd/status.h"

namespace fdsd {

// As Error, of a call `CallStatus Name(const Params& p)`: it may allocate, and no program of a model records it.
using CallStatus = Error;

}  // namespace fdsd
