#include "fdsd/mtp.h"
#include "ops.h"
#include "row_copy.h"
#include "scan.h"

namespace fdsd::cuda {
namespace {

constexpr int kScanThreads = 256;
// Blocks that share the rows of a request.
constexpr unsigned kRowParts = 8;

struct MtpArrays {
  DevicePtr<const int32_t> table_rows;
  DevicePtr<const int32_t> begin;
  DevicePtr<const int32_t> end;
  DevicePtr<const int32_t> hidden_begin;
  DevicePtr<const int32_t> cu_hidden;
  DevicePtr<const int32_t> num_committed;
  DevicePtr<const int32_t> cu_num_draft;
  DevicePtr<const int32_t> draft_token_ids;
  DevicePtr<const int32_t> block_table;
  DevicePtr<const int32_t> token_table;
  DevicePtr<int32_t> input_ids;
  DevicePtr<int32_t> positions;
  DevicePtr<int64_t> slot_mapping;
  DevicePtr<int32_t> query_start_loc;
  DevicePtr<int32_t> seq_lens;
  DevicePtr<int32_t> draft_rows;
};

struct MtpShape {
  int32_t num_requests;
  int32_t num_tokens;      // at least the requests' rows
  int32_t num_draft_rows;  // at least the requests that draft
  int32_t source;
  int32_t max_blocks;
  int32_t block_size;
  int32_t max_tokens_per_row;
  int32_t num_kept;
  int64_t units_per_row;
  int32_t mask_token;  // -1 = no blocks of drafts
  int32_t more_rows;
  int32_t token_shift;
};

// The rows of a request's block of drafts.
__device__ int32_t BlockRows(const MtpShape& shape, int32_t num_draft) {
  return shape.mask_token >= 0 && num_draft > 0 ? num_draft + shape.more_rows : 0;
}

// One block: where each request's slots begin, and the last row of each request that drafts.
__global__ __launch_bounds__(kScanThreads) void PassOffsetsKernel(MtpShape shape, MtpArrays a) {
  int32_t num_tokens = 0;
  int32_t num_draft_rows = 0;
  if (threadIdx.x == 0) a.query_start_loc[0] = 0;
  for (int first = 0; first < shape.num_requests; first += kScanThreads) {
    const int r = first + static_cast<int>(threadIdx.x);
    const bool is_request = r < shape.num_requests;
    const int32_t num_draft = is_request ? a.cu_num_draft[r + 1] - a.cu_num_draft[r] : 0;
    const int32_t end = is_request ? a.end[r] + BlockRows(shape, num_draft) : 0;
    const int32_t num_slots = is_request ? end - a.begin[r] : 0;
    const int32_t num_own = shape.mask_token >= 0 ? num_draft : static_cast<int32_t>(num_draft > shape.source);
    int32_t more_tokens;
    int32_t more_draft_rows;
    const int32_t tokens = num_tokens + BlockRunningSum<kScanThreads>(num_slots, &more_tokens);
    const int32_t draft_rows = num_draft_rows + BlockRunningSum<kScanThreads>(num_own, &more_draft_rows);
    if (is_request) {
      a.query_start_loc[r + 1] = tokens;
      a.seq_lens[r] = end;
    }
    for (int32_t before = num_own; before > 0; --before) a.draft_rows[draft_rows - before] = tokens - before;
    num_tokens += more_tokens;
    num_draft_rows += more_draft_rows;
  }
  for (int32_t row = num_draft_rows + static_cast<int32_t>(threadIdx.x); row < shape.num_draft_rows;
       row += kScanThreads)
    a.draft_rows[row] = 0;
}

// Rows of the layer before, see MtpPreprocessParams.
template <typename Unit>
struct HiddenRows {
  DevicePtr<const Unit> hidden;
  DevicePtr<const Unit> block_hidden;
  DevicePtr<const Unit> request_hidden;
  DevicePtr<const Unit> mask_hidden;
};

// Rows after the requests' own are padding and store nothing.
template <typename Unit>
__device__ void FillRows(const MtpShape& shape, const MtpArrays& a, DevicePtr<Unit> y) {
  const int32_t begin = a.query_start_loc[shape.num_requests];
  for (int32_t t = begin + static_cast<int32_t>(blockIdx.y); t < shape.num_tokens; t += kRowParts) {
    if (threadIdx.x == 0) {
      a.input_ids[t] = 0;
      a.positions[t] = 0;
      a.slot_mapping[t] = -1;
    }
    ClearRow(y + t * shape.units_per_row, shape.units_per_row);
  }
}

// Block (request, part): every kRowParts-th slot of a request. The blocks after the last request fill the padding.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads, 8) void PassRowsKernel(MtpShape shape, MtpArrays a, HiddenRows<Unit> rows,
                                                                  DevicePtr<Unit> y) {
  const int r = static_cast<int>(blockIdx.x);
  if (r == shape.num_requests) return FillRows(shape, a, y);
  const int64_t table_row = a.table_rows[r];
  const DevicePtr<const int32_t> blocks = a.block_table + table_row * shape.max_blocks;
  const int32_t begin = a.begin[r];
  const int32_t hidden_begin = a.hidden_begin[r];
  const int32_t num_committed = a.num_committed[r];
  const int32_t block_begin = a.end[r];
  const int32_t end = block_begin + BlockRows(shape, a.cu_num_draft[r + 1] - a.cu_num_draft[r]);
  for (int32_t slot = begin + static_cast<int32_t>(blockIdx.y); slot < end; slot += kRowParts) {
    const int64_t t = a.query_start_loc[r] + slot - begin;
    if (threadIdx.x == 0) {
      const int32_t place = slot - shape.token_shift;
      int32_t token = shape.mask_token;
      if (place < num_committed) {
        token = a.token_table[table_row * shape.max_tokens_per_row + place];
      } else if (token < 0) {  // A draft that could not be made is run as token 0.
        token = max(a.draft_token_ids[a.cu_num_draft[r] + place - num_committed], 0);
      }
      a.input_ids[t] = token;
      a.positions[t] = slot;
      a.slot_mapping[t] =
          static_cast<int64_t>(blocks[slot / shape.block_size]) * shape.block_size + slot % shape.block_size;
    }
    const int32_t position = slot - 1;
    const DevicePtr<Unit> to = y + t * shape.units_per_row;
    if (slot >= block_begin) {
      CopyRow(rows.mask_hidden, to, shape.units_per_row);
    } else if (position < shape.source) {
      ClearRow(to, shape.units_per_row);
    } else if (position >= hidden_begin) {
      const int64_t row = a.cu_hidden[r] + position - hidden_begin;
      CopyRow(rows.hidden + row * shape.units_per_row, to, shape.units_per_row);
    } else if ((position + 1) % shape.block_size == 0) {
      const int64_t row = blocks[position / shape.block_size];
      CopyRow(rows.block_hidden + row * shape.units_per_row, to, shape.units_per_row);
    } else {
      const int64_t row = table_row * shape.num_kept + position % shape.num_kept;
      CopyRow(rows.request_hidden + row * shape.units_per_row, to, shape.units_per_row);
    }
  }
}

template <typename Unit>
Error LaunchPassRows(const MtpPreprocessParams& p, MtpShape shape, const MtpArrays& arrays, Stream stream) {
  shape.units_per_row = p.rows.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const HiddenRows<Unit> rows{DevicePtr<const Unit>(p.rows.hidden), DevicePtr<const Unit>(p.rows.block_hidden),
                              DevicePtr<const Unit>(p.rows.request_hidden),
                              DevicePtr<const Unit>(p.draft_block.mask_hidden)};
  const LaunchShape launch{dim3(static_cast<unsigned>(p.num_requests) + 1, kRowParts), dim3(kCopyThreads)};
  return Launch<PassRowsKernel<Unit>>(launch, stream, shape, arrays, rows, DevicePtr<Unit>(p.out.hidden));
}

struct KeepShape {
  int32_t max_blocks;
  int32_t block_size;
  int32_t num_kept;
  int64_t units_per_row;
};

// Block (request, part): every kRowParts-th row of a request, where it is kept.
template <typename Unit>
__global__ __launch_bounds__(kCopyThreads, 8) void KeepHiddenKernel(
    KeepShape shape, DevicePtr<const int32_t> table_rows, DevicePtr<const int32_t> query_start_loc,
    DevicePtr<const int32_t> seq_lens, DevicePtr<const int32_t> block_table, DevicePtr<const Unit> hidden,
    DevicePtr<Unit> block_hidden, DevicePtr<Unit> request_hidden) {
  const int r = static_cast<int>(blockIdx.x);
  const int64_t table_row = table_rows[r];
  const int32_t end = seq_lens[r];
  const int32_t first_row = query_start_loc[r];
  const int32_t begin = end - (query_start_loc[r + 1] - first_row);
  for (int32_t position = begin + static_cast<int32_t>(blockIdx.y); position < end; position += kRowParts) {
    const DevicePtr<const Unit> row = hidden + static_cast<int64_t>(first_row + position - begin) * shape.units_per_row;
    if (position >= end - shape.num_kept) {
      const int64_t kept = table_row * shape.num_kept + position % shape.num_kept;
      CopyRow(row, request_hidden + kept * shape.units_per_row, shape.units_per_row);
    }
    if ((position + 1) % shape.block_size == 0) {
      const int64_t block = block_table[table_row * shape.max_blocks + position / shape.block_size];
      CopyRow(row, block_hidden + block * shape.units_per_row, shape.units_per_row);
    }
  }
}

template <typename Unit>
Error LaunchKeepHidden(const KeepHiddenParams& p, Stream stream) {
  const KeepShape shape{p.max_blocks, p.block_size, p.num_kept, p.row_bytes / static_cast<int64_t>(sizeof(Unit))};
  const LaunchShape launch{dim3(static_cast<unsigned>(p.num_requests), kRowParts), dim3(kCopyThreads)};
  return Launch<KeepHiddenKernel<Unit>>(
      launch, stream, shape, DevicePtr<const int32_t>(p.table_rows), DevicePtr<const int32_t>(p.query_start_loc),
      DevicePtr<const int32_t>(p.seq_lens), DevicePtr<const int32_t>(p.block_table), DevicePtr<const Unit>(p.hidden),
      DevicePtr<Unit>(p.block_hidden), DevicePtr<Unit>(p.request_hidden));
}

}  // namespace

Error MtpPreprocess(const MtpPreprocessParams& p, Stream stream) {
  if (p.num_requests < 0 || p.num_tokens < 0 || p.num_draft_rows < 0) return "sizes: expected no negative number";
  if (p.blocks.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.source < 0) return "source: expected >= 0, got a negative layer";
  if (p.rows.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  if (p.rows.num_kept < 1) return "num_kept: expected at least 1, got less";
  const MtpArrays arrays{DevicePtr<const int32_t>(p.requests.table_rows),
                         DevicePtr<const int32_t>(p.requests.begin),
                         DevicePtr<const int32_t>(p.requests.end),
                         DevicePtr<const int32_t>(p.requests.hidden_begin),
                         DevicePtr<const int32_t>(p.requests.cu_hidden),
                         DevicePtr<const int32_t>(p.requests.num_committed),
                         DevicePtr<const int32_t>(p.requests.cu_num_draft),
                         DevicePtr<const int32_t>(p.requests.draft_token_ids),
                         DevicePtr<const int32_t>(p.blocks.block_table),
                         DevicePtr<const int32_t>(p.tokens.token_table),
                         DevicePtr<int32_t>(p.out.input_ids),
                         DevicePtr<int32_t>(p.out.positions),
                         DevicePtr<int64_t>(p.out.slot_mapping),
                         DevicePtr<int32_t>(p.out.query_start_loc),
                         DevicePtr<int32_t>(p.out.seq_lens),
                         DevicePtr<int32_t>(p.out.draft_rows)};
  const MtpShape shape{p.num_requests,
                       p.num_tokens,
                       p.num_draft_rows,
                       p.source,
                       p.blocks.max_blocks,
                       p.blocks.block_size,
                       p.tokens.max_tokens_per_row,
                       p.rows.num_kept,
                       0,
                       p.draft_block.mask_token,
                       p.draft_block.more_rows,
                       p.draft_block.token_shift};
  const LaunchShape one_block{dim3(1), dim3(kScanThreads)};
  if (Error error = Launch<PassOffsetsKernel>(one_block, stream, shape, arrays)) return error;
  const void* const rows[] = {p.rows.hidden, p.rows.block_hidden, p.rows.request_hidden, p.draft_block.mask_hidden,
                              p.out.hidden};
  return WithCopyUnit(p.rows.row_bytes, rows,
                      [&]<typename Unit>(Unit) { return LaunchPassRows<Unit>(p, shape, arrays, stream); });
}

Error KeepHidden(const KeepHiddenParams& p, Stream stream) {
  if (p.num_requests < 0) return "num_requests: expected no negative number";
  if (p.block_size <= 0) return "block_size: expected a positive number, got less";
  if (p.num_kept < 1) return "num_kept: expected at least 1, got less";
  if (p.row_bytes < 0) return "row_bytes: expected >= 0, got a negative size";
  const void* const rows[] = {p.hidden, p.block_hidden, p.request_hidden};
  return WithCopyUnit(p.row_bytes, rows, [&]<typename Unit>(Unit) { return LaunchKeepHidden<Unit>(p, stream); });
}

}  // namespace fdsd::cuda
