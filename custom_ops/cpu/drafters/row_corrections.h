#pragma once
// How much longer steps take than was measured, by how many rows they have, against the machine's speed as a whole.
#include <cstdint>
#include <vector>

namespace fdsd {

// Follows steps by 1, 2, 4, .. rows, interpolated between them.
//
// What all steps have in common is the machine's speed; corrections say where some differ. Where nothing was seen they
// are those of the nearest rows. The optimism of a row count falls with the steps seen that had as many or more. So in
// doubt what is unknown is tried, as upper confidence bounds do. It is counted row by row: one row more may take
// another stair, of which steps below it say nothing, however many there were. Optimism is for decisions; what steps
// took is compared with what is known.
//
// Source: Auer, Cesa-Bianchi and Fischer, Finite-time Analysis of the Multiarmed Bandit Problem, 2002.
class RowCorrections {
 public:
  explicit RowCorrections(int32_t max_num_rows);

  // A step of 1 .. max_num_rows rows took `ratio` > 0 times as long as expected without optimism. Returns
  // whether it was of a rare kind, and news.
  bool Observe(int32_t num_rows, double ratio);

  // From now on factors are what is known by now, and the optimism.
  void Refresh();

  // What times are to be multiplied by, the speed left out, of 0 .. max_num_rows rows.
  void WriteFactors(bool is_optimistic, double* factors) const;

  // How long steps take against what was measured.
  double speed() const { return speed_; }

 private:
  std::vector<double> Known() const;
  void Count(int32_t num_rows);

  double speed_ = 1.0;
  std::vector<double> places_;  // of each number of rows, where it lies between the octaves
  // Of each octave the logarithm of its correction, and how many steps were seen.
  std::vector<double> logs_, num_steps_;
  // Of each number of rows the steps seen, times a unit that grows with every step.
  std::vector<double> num_of_rows_;
  double unit_ = 1.0;
  // Of the latest refresh: logarithms of what is known of each octave, and the optimism of each number of rows.
  std::vector<double> known_, optimism_;
};

}  // namespace fdsd
