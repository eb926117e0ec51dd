#pragma once
// What the next step takes with so many drafts in it: measured times, kept true by what steps take. Knows no drafts.
#include <cstdint>
#include <map>
#include <vector>

#include "cost_tables.h"
#include "fdsd/controller.h"
#include "row_corrections.h"
#include "statistics.h"

namespace fdsd {

//   T(rows, requests, KV tokens) = curve(rows) * shape(rows, requests)
//                                + slope(requests) * (KV tokens + share(requests) * those read by drafts)
//
// each part corrected by what steps take. A draft reads the context of its request again, out of nearer caches.
//
// Only how times compare matters to a decision: a machine that became slower as a whole changes none.
//
// Calls must not overlap.
class StepCost {
 public:
  static Error CheckCreate(const ControllerCostParams& p);

  explicit StepCost(CostTables tables);

  // What a decision is made by, in ms of the machine as it was measured: row counts that few steps had get an
  // optimistic time. `curve` of what is returned is as it is until the next Observe, and memory of this object.
  ControllerTimesParams Times(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens);

  // What a step of this kind takes as far as is known, in the same unit.
  double Expected(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens);

  // A step of this kind took `ms`. It counts up to a factor of 1.25 of the optimistic time, so that several must
  // agree before much changes.
  void Observe(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens, double ms);

  // How long steps take against when the machine was measured: 1.7 = they take 1.7 times as long.
  double speed() const { return corrections_.speed(); }

 private:
  // Times by rows, by numbers of requests, since the latest refresh. Each is made when it is asked for, where it was
  // before.
  struct Tables {
    struct Table {
      std::vector<double> times;
      int64_t refresh = -1;
    };
    std::vector<double> corrected;  // `curve`
    int64_t refresh = -1;           // that `corrected` is of
    std::map<int32_t, Table> by_requests;
  };
  const std::vector<double>& TableOf(int32_t num_requests, bool is_optimistic);
  double StepMs(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens, bool is_optimistic);
  double ContextMs(int32_t num_requests, int64_t num_kv_tokens) const;
  double Share(int32_t num_requests) const;
  int32_t Row(int32_t num_rows) const;

  const CostTables tables_;
  const RequestCounts shape_counts_;
  const ByRequests slopes_, shares_;
  RowCorrections corrections_;
  StepSlope more_share_;  // what drafts read besides what was measured
  int64_t num_observed_ = 0, num_refreshed_ = 0;
  Tables known_, optimistic_;
};

}  // namespace fdsd
