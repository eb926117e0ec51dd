#pragma once
// What measured steps say of all others: times by rows, requests and contexts. Knows no step that runs.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "fdsd/controller.h"

namespace fdsd {

class RequestCounts {
 public:
  RequestCounts() = default;
  explicit RequestCounts(const std::vector<int32_t>& counts) {
    for (const int32_t count : counts) Add(count);
  }

  // Requires more than all before.
  void Add(int32_t count) { logs_.push_back(std::log2(count)); }

  // Between the counts at `index` and after it, `part` of the way; part is 0 at the first and the last.
  struct Place {
    size_t index;
    double part;
  };

  // Requires at least one count.
  Place Find(int32_t num_requests) const {
    const double log = std::log2(std::max(num_requests, 1));
    if (log <= logs_.front()) return {0, 0.0};
    if (log >= logs_.back()) return {logs_.size() - 1, 0.0};
    const auto above = static_cast<size_t>(std::ranges::upper_bound(logs_, log) - logs_.begin());
    return {above - 1, (log - logs_[above - 1]) / (logs_[above] - logs_[above - 1])};
  }

 private:
  std::vector<double> logs_;
};

// A number by how many requests there are; 0 where none was measured.
class ByRequests {
 public:
  explicit ByRequests(const std::map<int32_t, double>& found) {
    for (const auto& [count, value] : found) {
      counts_.Add(count);
      values_.push_back(value);
    }
  }

  double At(int32_t num_requests) const {
    if (values_.empty()) return 0.0;
    const auto [index, part] = counts_.Find(num_requests);
    return part > 0 ? values_[index] + part * (values_[index + 1] - values_[index]) : values_[index];
  }

 private:
  RequestCounts counts_;
  std::vector<double> values_;
};

struct CostTables {
  // Requires a sample of one row of one request.
  explicit CostTables(const ControllerCostParams& p);

  Error Check() const;
  int32_t num_times() const { return static_cast<int32_t>(curve.size()); }

  int64_t short_context;        // tokens of a request that `curve` has in it: the shortest that was measured
  std::vector<double> curve;    // [N] ms of one request's step by its rows, rising
  std::vector<int32_t> counts;  // [C] numbers of requests, rising from 1
  std::vector<double> shapes;   // [C, N] times of so many requests' steps over `curve`
  // Reading contexts takes slopes * tokens, in ms. Each draft adds a share of that, 0 .. 1, as it reads from nearer
  // caches. Both depend on the number of requests: rows of several share nothing but the reading of weights.
  std::map<int32_t, double> slopes, shares;
};

}  // namespace fdsd
