#include "cost_tables.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

namespace fdsd {
namespace {

constexpr double kShortestMs = 1e-6;
// A draft does not read a context more often than its request's own token does; what was measured so was noise.
constexpr double kLargestShare = 1.0;

struct Sample {
  int32_t rows, requests, context;
  double ms;
};

// Values by rising numbers.
struct Points {
  std::vector<double> x, y;

  // Piecewise linear, and constant outside. Requires at least one point.
  double At(double wanted) const {
    if (wanted <= x.front()) return y.front();
    if (wanted >= x.back()) return y.back();
    const auto j = static_cast<size_t>(std::ranges::upper_bound(x, wanted) - x.begin()) - 1;
    if (x[j] == wanted) return y[j];
    return (y[j + 1] - y[j]) / (x[j + 1] - x[j]) * (wanted - x[j]) + y[j];
  }
};

template <typename Key>
Points Sorted(const std::map<Key, double>& found) {
  Points points;
  for (const auto& [key, value] : found) {
    points.x.push_back(key);
    points.y.push_back(value);
  }
  return points;
}

// Times by rows. Beyond the last point R a row takes what one took since R / 2: over fewer rows noise and stairs would
// decide. It takes no more than one of R took: more rows can be run as several steps.
class Interpolated {
 public:
  explicit Interpolated(const std::vector<Sample>& samples) {
    std::map<int32_t, double> best;
    for (const Sample& s : samples) {
      const auto [at, is_new] = best.emplace(s.rows, s.ms);
      if (!is_new) at->second = std::min(s.ms, at->second);
    }
    points_ = Sorted(best);
    const std::vector<double>&x = points_.x, &y = points_.y;
    if (x.size() < 2) return;
    const auto above = static_cast<size_t>(std::ranges::upper_bound(x, x.back() / 2) - x.begin());
    const size_t before = std::max<size_t>(above, 1) - 1;
    slope_ = std::min(std::max(0.0, (y.back() - y[before]) / (x.back() - x[before])), y.back() / x.back());
  }

  double At(double rows) const {
    if (points_.x.size() < 2 || rows <= points_.x.back()) return points_.At(rows);
    return points_.y.back() + slope_ * (rows - points_.x.back());
  }

 private:
  Points points_;
  double slope_ = 0.0;
};

// Of one request at the shortest context.
std::vector<double> CurveOf(const std::vector<Sample>& samples, int64_t short_context, int32_t max_num_rows) {
  std::vector<Sample> own, all;
  for (const Sample& s : samples)
    if (s.requests == 1 && s.context <= short_context) own.push_back(s);
  const int32_t longest = std::ranges::max(own, {}, &Sample::rows).rows;
  all = own;
  for (const Sample& s : samples)
    if (s.requests == 0 && s.rows > longest) all.push_back(s);
  // Of a prompt's rows one chooses a token, so as many of a request and its drafts take no less.
  const Interpolated alone(own), at_least(all);
  std::vector<double> curve;
  double most = -std::numeric_limits<double>::infinity();
  for (int32_t rows = 0; rows <= max_num_rows; ++rows) {
    // More rows never take less: what was measured so was noise.
    most = std::max({most, alone.At(rows), at_least.At(rows)});
    curve.push_back(most);
  }
  return curve;
}

void FindContexts(const std::vector<Sample>& samples, int64_t short_context, std::map<int32_t, double>* slopes,
                  std::map<int32_t, double>* shares) {
  using Shape = std::tuple<int32_t, int32_t, int64_t>;  // requests, rows, context
  std::map<Shape, double> found;
  for (const Sample& s : samples)
    if (s.requests > 0) found[{s.requests, s.rows, s.context}] = s.ms;
  for (const auto& [shape, ms] : found) {
    const auto [n, rows, context] = shape;
    const auto base = found.find({n, rows, short_context});
    if (context <= short_context || base == found.end()) continue;
    const double per_token = (ms - base->second) / static_cast<double>(n * (context - short_context));
    const double slope = slopes->contains(n) ? slopes->at(n) : 0.0;
    if (rows == n) {
      (*slopes)[n] = std::max(per_token, 0.0);
    } else if (slope > 0) {
      const double share = (per_token / slope - 1.0) / (static_cast<double>(rows) / n - 1.0);
      (*shares)[n] = std::min(std::max(share, 0.0), kLargestShare);
    }
  }
}

// Interpolated over factors of two; 0 where none was measured.
double At(const std::map<int32_t, double>& found, int32_t num_requests) {
  if (found.empty()) return 0.0;
  std::map<double, double> by_log;
  for (const auto& [count, value] : found) by_log[std::log2(count)] = value;
  return Sorted(by_log).At(std::log2(std::max(num_requests, 1)));
}

bool ArePositive(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double value) { return value > 0 && std::isfinite(value); });
}

}  // namespace

CostTables::CostTables(const ControllerCostParams& p) : short_context(std::numeric_limits<int64_t>::max()) {
  std::vector<Sample> samples;
  for (int32_t i = 0; i < p.num_samples; ++i) samples.push_back({p.rows[i], p.requests[i], p.contexts[i], p.ms[i]});
  for (const Sample& s : samples)
    if (s.rows == 1 && s.requests == 1) short_context = std::min<int64_t>(short_context, s.context);
  curve = CurveOf(samples, short_context, p.max_num_rows);
  FindContexts(samples, short_context, &slopes, &shares);
  // Of equal shapes the one with the shortest context counts.
  std::ranges::stable_sort(samples, std::greater<>(), &Sample::context);
  std::map<int32_t, std::map<int32_t, double>> ratios;  // by requests and rows
  for (const Sample& s : samples) {
    if (s.requests <= 1 || s.rows > p.max_num_rows) continue;
    const auto num_more = static_cast<double>(std::max<int64_t>(0, s.requests * (s.context - short_context)));
    const double ms = s.ms - At(slopes, s.requests) * num_more;
    ratios[s.requests][s.rows] = std::max(ms, kShortestMs) / curve[static_cast<size_t>(s.rows)];
  }
  counts = {1};
  shapes.assign(curve.size(), 1.0);
  for (const auto& [n, by_rows] : ratios) {
    counts.push_back(n);
    const Points points = Sorted(by_rows);
    for (size_t rows = 0; rows < curve.size(); ++rows) shapes.push_back(points.At(static_cast<double>(rows)));
  }
}

Error CostTables::Check() const {
  if (!ArePositive(curve)) return "curve: expected finite rising numbers > 0, got others";
  if (!ArePositive(shapes)) return "shapes: expected finite numbers > 0, got others";
  for (const auto& [count, slope] : slopes)
    if (!std::isfinite(slope)) return "slopes: expected finite numbers >= 0, got others";
  return nullptr;
}

}  // namespace fdsd
