#pragma once
// What the ops know of a rank's expert service.
#include "fdsd/experts.h"

namespace fdsd {

// Rows of one layer, at most as many as fit.
struct ExpertRows {
  int32_t layer;
  int32_t num_rows;
  int64_t row_bytes;
  const char* x;              // [num_rows] rows
  const int32_t* expert_ids;  // [num_rows, top_k]
};

// Used by the thread that runs the ops.
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;

  // The layer as it was added; an error where it was not.
  virtual Error FindLayer(int32_t layer, const ExpertServiceLayerParams** found) const = 0;
  virtual int32_t capacity() const = 0;  // rows at a time

  // A pass begins that needs the layers from this one on. Ranks that are far into a pass get the chance to begin their
  // next one at the same time: the experts' weights are then read once for all of them.
  virtual Error BeginPass(int32_t layer) = 0;
  virtual void EndPass() = 0;

  // Give rows to the ranks that have their experts. The expert ids must live until Await returns. Waits for what is
  // left of the last job if that failed.
  virtual Error Post(const ExpertRows& rows) = 0;
  // No more rows of this layer in this pass.
  virtual void LeaveLayer(int32_t layer) = 0;
  // Wait until the experts have run on so many rows, which were posted. An error names the rank that does not come.
  virtual Error Await(int32_t layer, int32_t num_rows) = 0;
  // What the k-th expert makes of a row of them, until the next Post.
  virtual const float* Result(int64_t row, int32_t k) const = 0;
};

// nullptr where no open service has the handle.
ExpertExchange* FindExpertExchange(int32_t handle);

}  // namespace fdsd
