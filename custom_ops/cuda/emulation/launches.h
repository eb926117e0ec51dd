#pragma once
// Launches by name, and a list of those that are noted instead of run.
#include <cstdint>
#include <string>

#include "emulation/engine.h"

namespace fdsd::emulation {

// The kernel in "... [with auto kernel = fdsd::cuda::{anonymous}::NAME; Arguments = ...]".
std::string PlainName(const std::string& whole);

// From now on launches are noted instead of run, or run again; what was noted before is forgotten.
void NoteLaunches(bool is_noted);
// Whether a launch is not to be run, as it was noted.
bool NoteLaunch(const char* name, Size3 block, int32_t dynamic_bytes);
// A line "threads dynamic_bytes kernel" for each that was noted.
const char* NotedLaunches();

}  // namespace fdsd::emulation
