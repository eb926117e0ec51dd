#pragma once
// What measured steps say of all others: times by rows, requests and contexts. Knows no step that runs.
#include <cstdint>
#include <map>
#include <vector>

#include "fdsd/controller.h"

namespace fdsd {

struct CostTables {
  // Requires a sample of one row of one request.
  explicit CostTables(const ControllerCostParams& p);

  Error Check() const;
  int32_t num_times() const { return static_cast<int32_t>(curve.size()); }

  int64_t short_context;        // tokens of a request that `curve` has in it: the shortest that was measured
  std::vector<double> curve;    // [N] ms of one request's step by its rows, rising
  std::vector<int32_t> counts;  // [C] numbers of requests, rising from 1
  std::vector<double> shapes;   // [C, N] times of so many requests' steps over `curve`
  // Reading contexts takes slopes * tokens, in ms; of it for each draft its share again, 0 .. 1, out of nearer caches.
  // Both depend on the number of requests: rows of several share nothing but the reading of weights.
  std::map<int32_t, double> slopes, shares;
};

}  // namespace fdsd
