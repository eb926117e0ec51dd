#include <algorithm>

#include "runtime/memory_ops.h"
#include "struct_load.h"

namespace fdsd::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWordsPerBlock = 2048;
constexpr int64_t kBytesPerBlock = 32 * 1024;

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

struct BlockIds {
  int32_t ids[kMaxCopiedBlocks];
};

// Block (i, p, part) of the grid copies a part of what KV block i holds of piece p.
template <typename Unit, bool kIsUnpacking>
__global__ void CopyBlocksKernel(DevicePtr<const BlockPiece> pieces, const __grid_constant__ BlockIds block_ids,
                                 DevicePtr<uint8_t> packed, int64_t packed_bytes, int64_t begin_of_pieces) {
  constexpr int64_t kUnit = sizeof(Unit);
  const int32_t block_id = block_ids.ids[blockIdx.x];
  if (block_id < 0) return;
  const BlockPiece piece = LoadStruct(pieces, blockIdx.y);
  const DevicePtr<Unit> own(reinterpret_cast<Unit*>(static_cast<uint8_t*>(piece.blocks) + block_id * piece.num_bytes));
  const DevicePtr<Unit> other = ViewAs<Unit>(packed + (blockIdx.x * packed_bytes + piece.begin - begin_of_pieces));
  const int64_t first = static_cast<int64_t>(blockIdx.z) * (kBytesPerBlock / kUnit);
  const int64_t num_units = piece.num_bytes / kUnit;
  const int64_t end = first + kBytesPerBlock / kUnit < num_units ? first + kBytesPerBlock / kUnit : num_units;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    if constexpr (kIsUnpacking) {
      own[i] = other[i];
    } else {
      other[i] = own[i];
    }
  }
}

template <typename Unit>
Error LaunchCopy(const CopyBlocksParams& p, const BlockIds& block_ids, Stream stream) {
  const auto num_parts = static_cast<unsigned>((p.max_num_bytes + kBytesPerBlock - 1) / kBytesPerBlock);
  const LaunchShape shape{dim3(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(p.num_pieces), num_parts),
                          dim3(kThreads)};
  const DevicePtr<const BlockPiece> pieces(p.pieces);
  const DevicePtr<uint8_t> packed(p.packed);
  if (p.is_unpacking != 0) {
    return Launch<CopyBlocksKernel<Unit, true>>(shape, stream, pieces, block_ids, packed, p.packed_bytes, p.begin);
  }
  return Launch<CopyBlocksKernel<Unit, false>>(shape, stream, pieces, block_ids, packed, p.packed_bytes, p.begin);
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

Error CopyBlocks(const CopyBlocksParams& p, Stream stream) {
  if (p.num_blocks < 0 || p.num_blocks > kMaxCopiedBlocks) return "num_blocks: expected 0..256";
  if (p.num_pieces < 0) return "num_pieces: expected no negative number";
  if (p.unit_bytes != 4 && p.unit_bytes != 16) return "unit_bytes: expected 4 or 16";
  if (p.max_num_bytes < 0 || p.max_num_bytes % p.unit_bytes != 0) return "max_num_bytes: expected whole units";
  if (p.packed_bytes < 0 || p.packed_bytes % p.unit_bytes != 0) return "packed_bytes: expected whole units";
  BlockIds block_ids{};
  std::copy_n(p.block_ids, p.num_blocks, block_ids.ids);
  return p.unit_bytes == 16 ? LaunchCopy<uint4>(p, block_ids, stream) : LaunchCopy<uint32_t>(p, block_ids, stream);
}

}  // namespace fdsd::cuda
