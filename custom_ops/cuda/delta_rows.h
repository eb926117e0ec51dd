#pragma once
// The rows of a request in a gated delta net: those replayed from its drafts, then the step's.
#include "numbers.h"

namespace fdsd::cuda {

struct DeltaShape {
  int32_t num_key_heads;
  int32_t num_value_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t conv_width;
  int32_t max_drafts;
  int32_t num_requests;
  int32_t num_tokens;
  float eps;

  __host__ __device__ int64_t keys() const { return int64_t{num_key_heads} * key_dim; }
  __host__ __device__ int64_t values() const { return int64_t{num_value_heads} * value_dim; }
  __host__ __device__ int64_t qkv() const { return 2 * keys() + values(); }
  __host__ __device__ int64_t gates() const { return int64_t{2} * num_value_heads; }
};

struct DeltaMaps {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> source;
  DevicePtr<const int32_t> num_replayed;
  DevicePtr<const int32_t> num_certain;
  DevicePtr<const int32_t> query_start_loc;
  DevicePtr<const int32_t> cu_snapshots;
  DevicePtr<const int32_t> snapshot_ends;
  DevicePtr<const int32_t> snapshot_slots;
};

struct DeltaWeightArrays {
  DevicePtr<const float> conv;
  DevicePtr<const float> a_log;
  DevicePtr<const float> dt_bias;
  DevicePtr<const float> norm;
};

template <typename T>
struct DeltaRows {
  __device__ DeltaRows(const DeltaShape& shape, const DeltaMaps& maps, int32_t r, DevicePtr<const T> all_qkvz,
                       DevicePtr<const T> all_ba, DevicePtr<const T> all_conv_rows, DevicePtr<const T> all_drafts)
      : qkv(shape.qkv()),
        qkvz_width(qkv + shape.values()),
        num_gates(shape.gates()),
        history(shape.conv_width - 1),
        source(maps.source[r]),
        table_row(maps.table_rows[r]),
        num_replayed(maps.num_replayed[r]),
        num_kept(num_replayed + maps.num_certain[r]),
        first(maps.query_start_loc[r]),
        count(num_replayed + maps.query_start_loc[r + 1] - first),
        qkvz(all_qkvz + first * qkvz_width),
        ba(all_ba + first * num_gates),
        conv_rows(all_conv_rows),
        drafts(all_drafts + int64_t{table_row} * shape.max_drafts * (qkv + num_gates)) {}

  // Column c of q | k | v before the convolution; of a row before the first from the state.
  __device__ float Raw(int32_t row, int64_t c) const { return ToFloat(RawElement(row, c)); }
  __device__ T RawElement(int32_t row, int64_t c) const {
    if (row >= num_replayed) return qkvz[(row - num_replayed) * qkvz_width + c];
    if (row >= 0) return drafts[row * (qkv + num_gates) + c];
    return source < 0 ? T{} : conv_rows[(int64_t{source} * history + history + row) * qkv + c];
  }

  // Column c of b | a.
  __device__ float Gate(int32_t row, int32_t c) const {
    return row >= num_replayed ? LoadFloat<T>(ba, (row - num_replayed) * num_gates + c)
                               : LoadFloat<T>(drafts, row * (qkv + num_gates) + qkv + c);
  }

  int64_t qkv;
  int64_t qkvz_width;
  int64_t num_gates;
  int32_t history;
  int32_t source;
  int32_t table_row;
  int32_t num_replayed;
  int32_t num_kept;
  int64_t first;
  int32_t count;
  DevicePtr<const T> qkvz;
  DevicePtr<const T> ba;
  DevicePtr<const T> conv_rows;
  DevicePtr<const T> drafts;
};

}  // namespace fdsd::cuda
