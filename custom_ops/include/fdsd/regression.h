#pragma once
// What the calls of the detector look like: whether drafting pays.
#include "fdsd/status.h"

namespace fdsd {

class RegressionDetector;

struct RegressionCreateParams {
  RegressionDetector** detector;  // [1], to be destroyed with fdsd_regression_destroy
};

// A step is over; see RegressionDetector::Step.
struct RegressionObserveParams {
  RegressionDetector* detector;
  int32_t num_requests;  // >= 0, and > 0 where num_tokens is
  int32_t num_tokens;    // >= 0
  int32_t num_drafts;    // >= 0
  double seconds;        // > 0 where num_tokens is
  double asking_s;
  double slowdown_ratio;
};

// What the detector says of steps of so many requests; see RegressionDetector.
struct RegressionFacts {
  double least_gain;
  double gain;              // of the class of the latest step
  int32_t is_off;           // 0 or 1
  int32_t is_worth_asking;  // likewise
};

struct RegressionFactsParams {
  const RegressionDetector* detector;
  int32_t num_requests;    // >= 0
  RegressionFacts* facts;  // [1]
};

}  // namespace fdsd
