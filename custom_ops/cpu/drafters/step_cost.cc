#include "step_cost.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <utility>

namespace fdsd {
namespace {

// So many steps are observed before their times change what is expected of others, unless they are of a rare kind.
constexpr int64_t kRefreshSteps = 64;
// One step says at most this much: what interrupts it says nothing of it, and interrupts long steps most often.
constexpr double kMostStepRatio = 1.25;

// What drafts would take to read contexts, if each took what its request's own token does.
double ReadMs(int32_t num_rows, int32_t num_requests, double context_ms) {
  return (num_rows - num_requests) * context_ms / std::max(num_requests, 1);
}

}  // namespace

Error StepCost::CheckCreate(const ControllerCostParams& p) {
  if (p.max_num_rows < 1) return "max_num_rows: expected at least 1, got less";
  bool has_base = false;
  for (int32_t i = 0; i < p.num_samples; ++i) {
    has_base |= p.rows[i] == 1 && p.requests[i] == 1;
    if (p.rows[i] < 1 || p.requests[i] < 0) return "steps: expected rows >= 1 and requests >= 0, got others";
    if (p.contexts[i] < 0) return "contexts: expected >= 0, got a negative number";
  }
  return has_base ? nullptr : "steps: expected one of one row of one request, got none";
}

StepCost::StepCost(CostTables tables)
    : tables_(std::move(tables)),
      shape_counts_(tables_.counts),
      slopes_(tables_.slopes),
      shares_(tables_.shares),
      corrections_(tables_.num_times() - 1) {}

ControllerTimesParams StepCost::Times(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens) {
  const auto num_times = static_cast<int32_t>(tables_.curve.size());
  const double context_ms = ContextMs(num_requests, num_kv_tokens);
  return {.num_step_rows = std::min(num_rows, num_times - 1),
          .num_times = num_times,
          .curve = TableOf(num_requests, true).data(),
          .fixed = context_ms,
          .per_draft = Share(num_requests) * context_ms / std::max(num_requests, 1),
          .any_draft = 0.0};
}

double StepCost::Expected(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens) {
  return StepMs(num_rows, num_requests, num_kv_tokens, false);
}

void StepCost::Observe(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens, double ms) {
  const double read_ms = ReadMs(num_rows, num_requests, ContextMs(num_requests, num_kv_tokens));
  const double expected = StepMs(num_rows, num_requests, num_kv_tokens, false);
  const double optimistic = StepMs(num_rows, num_requests, num_kv_tokens, true);
  const double measured = expected + (shares_.At(num_requests) - Share(num_requests)) * read_ms;
  // An optimistic time is corrected upwards more slowly than downwards, yet it has no part in what is known.
  const double ratio =
      std::clamp(ms / (optimistic * speed()), 1 / kMostStepRatio, kMostStepRatio) * optimistic / expected;
  more_share_.Observe(ratio * speed() * expected / measured, read_ms / measured);
  const bool is_news = corrections_.Observe(Row(num_rows), ratio);
  ++num_observed_;
  if (is_news || num_observed_ % kRefreshSteps == 0) {
    corrections_.Refresh();
    ++num_refreshed_;
  }
}

double StepCost::StepMs(int32_t num_rows, int32_t num_requests, int64_t num_kv_tokens, bool is_optimistic) {
  const double context_ms = ContextMs(num_requests, num_kv_tokens);
  return TableOf(num_requests, is_optimistic)[static_cast<size_t>(Row(num_rows))] + context_ms +
         Share(num_requests) * ReadMs(num_rows, num_requests, context_ms);
}

// Of every number of rows of so many requests, at the shortest context; rising, as more rows never take less.
const std::vector<double>& StepCost::TableOf(int32_t num_requests, bool is_optimistic) {
  Tables& tables = is_optimistic ? optimistic_ : known_;
  if (tables.refresh != num_refreshed_) {
    tables.corrected.resize(tables_.curve.size());
    corrections_.WriteFactors(is_optimistic, tables.corrected.data());
    std::ranges::transform(tables.corrected, tables_.curve, tables.corrected.begin(), std::multiplies<>());
    tables.refresh = num_refreshed_;
  }
  // Of more requests than were measured nothing else is known.
  num_requests = std::clamp(num_requests, 1, tables_.counts.back());
  Tables::Table& table = tables.by_requests[num_requests];
  if (table.refresh == num_refreshed_) return table.times;
  table.times.resize(tables_.curve.size());
  const auto [index, part] = shape_counts_.Find(num_requests);
  const double* low = tables_.shapes.data() + index * tables_.curve.size();
  const double* high = part > 0 ? low + tables_.curve.size() : low;
  double most = 0.0;
  for (size_t rows = 0; rows < tables_.curve.size(); ++rows) {
    most = std::max(most, tables.corrected[rows] * ((1.0 - part) * low[rows] + part * high[rows]));
    table.times[rows] = most;
  }
  table.refresh = num_refreshed_;
  return table.times;
}

// What the requests' own tokens take to read so many tokens of context, of all requests together.
double StepCost::ContextMs(int32_t num_requests, int64_t num_kv_tokens) const {
  const int64_t num_more = std::max<int64_t>(0, num_kv_tokens - num_requests * tables_.short_context);
  return slopes_.At(num_requests) * static_cast<double>(num_more);
}

// What a draft takes to read its request's context, over what the request's own token does.
double StepCost::Share(int32_t num_requests) const {
  return std::max(0.0, shares_.At(num_requests) + more_share_.value());
}

int32_t StepCost::Row(int32_t num_rows) const {
  return std::clamp(num_rows, 1, static_cast<int32_t>(tables_.curve.size()) - 1);
}

}  // namespace fdsd
