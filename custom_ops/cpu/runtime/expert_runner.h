#pragma once
// Runs a rank's experts elsewhere than on the processor: functions of another library, for an ExpertServer.
#include "fdsd/experts.h"

namespace fdsd {

struct ExpertRunner {
  void* self;
  // Make room for a layer, before any is run; an error where its experts cannot be run.
  Error (*add_layer)(void* self, const ExpertServiceLayerParams& p);
  // Whether it can read a rank's rows and write its results: not while that rank is being started again.
  bool (*reaches)(void* self, int32_t home);
  // As RunExperts, and returns when the results are where the homes read them. A row of x is home * capacity + row, one
  // of y is home * max_pairs + pair, and x and y are nullptr: the runner knows where both lie.
  Error (*run)(void* self, const RunExpertsParams& p);
};

}  // namespace fdsd
