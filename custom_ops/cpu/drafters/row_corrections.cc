#include "row_corrections.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace fdsd {
namespace {

// The speed follows at this rate, and what was seen of so many rows against it; that of the first steps counts for
// more.
constexpr double kSpeedRate = 0.1, kRate = 0.02, kFirstRate = 0.33;
const double kMostLog = std::log(2.0);
// More rows than any step had lately are expected to take so much of what was measured. On a large model that was once,
// or never, and is off by as much; too high, such steps would never be run, and it would never be found out.
const double kOptimismLog = std::log(0.85);
// A step is remembered as this much less with every later one. An octave is forgotten when less of its steps is left,
// and counts them up to so many.
constexpr double kMemory = 0.998, kForgotten = 0.25, kMostSteps = 64.0;
// A step that changed a correction by a rate above this is news, and so is one of rows with as much optimism.
constexpr double kNewsRate = 0.04, kNewsOptimism = 0.04;
// The unit starts anew beyond this.
constexpr double kLargestUnit = 1e100;

}  // namespace

RowCorrections::RowCorrections(int32_t max_num_rows) {
  for (int32_t rows = 0; rows <= max_num_rows; ++rows) places_.push_back(std::log2(std::max(rows, 1)));
  const auto num_octaves = static_cast<size_t>(std::bit_width(static_cast<uint32_t>(max_num_rows)));
  for (std::vector<double>* octaves : {&logs_, &num_steps_, &known_}) octaves->assign(num_octaves, 0.0);
  for (std::vector<double>* of_rows : {&num_of_rows_, &optimism_}) of_rows->assign(places_.size(), 0.0);
}

bool RowCorrections::Observe(int32_t num_rows, double ratio) {
  struct Part {
    size_t octave;
    double share;
  };
  const auto below = static_cast<size_t>(std::bit_width(static_cast<uint32_t>(num_rows))) - 1;
  const bool is_last = below + 1 == logs_.size();
  const double above = is_last ? 0.0 : places_[static_cast<size_t>(num_rows)] - static_cast<double>(below);
  const Part parts[] = {{below, 1.0 - above}, {is_last ? below : below + 1, above}};
  const auto is_rare = [&](const Part& part) { return part.share > 0 && num_steps_[part.octave] <= kForgotten; };
  if (std::ranges::any_of(parts, is_rare)) logs_ = Known();
  for (double& num_steps : num_steps_) num_steps *= kMemory;
  const double log = std::log(ratio);
  bool is_news = optimism_[static_cast<size_t>(num_rows)] < -kNewsOptimism;
  Count(num_rows);
  for (const auto& [octave, share] : parts) {
    const double rate = share * std::max(kRate, kFirstRate / (1.0 + num_steps_[octave]));
    is_news |= rate > kNewsRate;
    logs_[octave] += rate * log;
    num_steps_[octave] = std::min(num_steps_[octave] + share, kMostSteps);
  }
  const double common = std::inner_product(num_steps_.begin(), num_steps_.end(), logs_.begin(), 0.0) /
                        std::reduce(num_steps_.begin(), num_steps_.end());
  for (double& octave : logs_) octave = std::clamp(octave - common, -kMostLog, kMostLog);
  speed_ *= std::exp(kSpeedRate * log + common);
  return is_news;
}

// Every step before counts a little less from now on. They are too many rows to lessen in every step: this one counts
// more.
void RowCorrections::Count(int32_t num_rows) {
  unit_ /= kMemory;
  num_of_rows_[static_cast<size_t>(num_rows)] += unit_;
  if (unit_ < kLargestUnit) return;
  for (double& count : num_of_rows_) count /= unit_;
  unit_ = 1.0;
}

void RowCorrections::Refresh() {
  known_ = Known();
  double num_as_large = 0.0;
  for (size_t rows = optimism_.size(); rows-- > 0;) {
    num_as_large += num_of_rows_[rows] / unit_;
    optimism_[rows] = kOptimismLog / (1.0 + num_as_large);
  }
  // What all rows have in common is no optimism.
  const double of_all = optimism_.front();
  for (double& optimism : optimism_) optimism -= of_all;
}

void RowCorrections::WriteFactors(bool is_optimistic, double* factors) const {
  std::vector<double> known = known_;
  known.push_back(known.back());
  for (size_t rows = 0; rows < places_.size(); ++rows) {
    const auto octave = static_cast<size_t>(places_[rows]);
    const double part = places_[rows] - static_cast<double>(octave);
    const double log = known[octave] + part * (known[octave + 1] - known[octave]);
    factors[rows] = std::exp(is_optimistic ? log + optimism_[rows] : log);
  }
}

// Logarithms of corrections, by octave; where nothing was seen lately, those of the nearest.
std::vector<double> RowCorrections::Known() const {
  std::vector<double> found = logs_;
  size_t num_done = 0;  // octaves that are known
  for (size_t octave = 0; octave < logs_.size(); ++octave) {
    if (num_steps_[octave] <= kForgotten) continue;
    const double end = logs_[octave];
    const bool is_first = num_done == 0;
    const double begin = is_first ? end : logs_[num_done - 1];
    const double slope = is_first ? 0.0 : (end - begin) / static_cast<double>(octave + 1 - num_done);
    for (size_t i = num_done; i < octave; ++i) found[i] = begin + slope * static_cast<double>(i + 1 - num_done);
    num_done = octave + 1;
  }
  for (size_t i = num_done; num_done > 0 && i < logs_.size(); ++i) found[i] = logs_[num_done - 1];
  return found;
}

}  // namespace fdsd
