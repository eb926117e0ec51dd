#include <algorithm>

#include "runtime/memory_ops.h"
#include "struct_load.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWordsPerBlock = 2048;

// Block (i, part) copies a part of piece i.
__global__ void ScatterPiecesKernel(DevicePtr<const ScatterPiece> pieces, DevicePtr<const uint8_t> bytes) {
  const ScatterPiece piece = LoadStruct(pieces, blockIdx.x);
  const DevicePtr<const uint32_t> from = ViewAs<const uint32_t>(bytes + piece.begin);
  const DevicePtr<uint32_t> to(static_cast<uint32_t*>(piece.to));
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kWordsPerBlock;
  const int64_t num_words = piece.num_bytes / 4;
  const int64_t end = begin + kWordsPerBlock < num_words ? begin + kWordsPerBlock : num_words;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) to[i] = from[i];
}

template <typename T>
__device__ void Fill(const PadColumn& column, int32_t num_own, int32_t num_rows) {
  const DevicePtr<T> elements(static_cast<T*>(column.column));
  const int32_t begin = num_own + column.extra;
  const T value = column.repeats_last != 0 ? static_cast<T>(elements[begin - 1]) : static_cast<T>(column.value);
  for (int32_t i = begin + static_cast<int32_t>(threadIdx.x); i < num_rows + column.extra; i += kThreads) {
    elements[i] = value;
  }
}

// A block per column.
__global__ void PadColumnsKernel(int32_t num_rows, DevicePtr<const PadColumn> columns,
                                 DevicePtr<const int32_t> num_own) {
  const PadColumn column = LoadStruct(columns, blockIdx.x);
  if (column.element_bytes == 8) {
    Fill<int64_t>(column, num_own[0], num_rows);
  } else {
    Fill<int32_t>(column, num_own[0], num_rows);
  }
}

}  // namespace

Error ScatterPieces(const ScatterPiecesParams& p, Stream stream) {
  if (p.num_pieces < 0) return "num_pieces: expected no negative number";
  if (p.max_num_bytes < 0 || p.max_num_bytes % 4 != 0) return "max_num_bytes: expected a multiple of 4";
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_pieces),
                               static_cast<unsigned>((p.max_num_bytes / 4 + kWordsPerBlock - 1) / kWordsPerBlock)),
                          dim3(kThreads)};
  return Launch<ScatterPiecesKernel>(shape, stream, DevicePtr<const ScatterPiece>(p.pieces),
                                     DevicePtr<const uint8_t>(p.bytes));
}

Error PadColumns(const PadColumnsParams& p, Stream stream) {
  if (p.num_columns < 0) return "num_columns: expected no negative number";
  if (p.num_rows < 0) return "num_rows: expected no negative number";
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_columns)), dim3(kThreads)};
  return Launch<PadColumnsKernel>(shape, stream, p.num_rows, DevicePtr<const PadColumn>(p.columns),
                                  DevicePtr<const int32_t>(p.num_own));
}

}  // namespace fdsd::cuda
