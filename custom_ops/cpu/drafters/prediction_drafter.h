#pragma once
// Drafts from what the clients of some requests predict as their outputs. Knows no requests, only table rows.
#include <cstdint>
#include <memory>
#include <vector>

#include "fdsd/draft.h"
#include "predicted_text.h"

namespace fdsd {

// Calls must not overlap.
class PredictionDrafter {
 public:
  // Requires num_table_rows >= 0.
  explicit PredictionDrafter(int32_t num_table_rows);

  // Begin a request; what the table row held is forgotten.
  Error Begin(const PredictionBeginParams& p);

  // Free what the table rows hold; one that was not begun is ignored.
  Error Forget(const int32_t* table_rows, int32_t count);

  // Read the new committed tokens of every row that was begun, and copy what the predicted text has next. Rows that
  // were not begun have no drafts. Arguments are checked before anything is changed.
  Error Propose(const DraftProposeParams& p);

  int64_t num_bytes() const;

 private:
  struct Row {
    PredictedText text;
    PredictionFollower follower;
    int32_t begin = 0;     // of the output
    int32_t num_read = 0;  // tokens of the row
  };

  bool IsOutside(int32_t table_row) const { return table_row < 0 || static_cast<size_t>(table_row) >= rows_.size(); }
  Error CheckRows(const DraftProposeParams& p) const;
  int32_t Draft(const DraftProposeParams& p, int32_t r, Row* row) const;

  const uint64_t multiplier_;
  std::vector<std::unique_ptr<Row>> rows_;  // nullptr = not begun
};

}  // namespace fdsd
