#pragma once
// Rows that are multiplied with several matrices, each row with one: those of a matrix follow one another. Which they
// are is known on the device only, so launches have blocks for the most tiles there can be, and some find no rows.
#include "device.h"
#include "fdsd/linear.h"

namespace fdsd::cuda {

constexpr int32_t kFloatTileRows = 8;
constexpr int32_t kManyRows = 128;

struct RowGroups {
  int32_t count;      // of matrices, packed one after another
  int32_t max_rows;   // of all groups together
  int32_t tile_rows;  // by which `first_tile` counts
  // nullptr where all rows are one group's.
  DevicePtr<const int32_t> first;       // [count + 1] the rows of group g are [first[g], first[g + 1])
  DevicePtr<const int32_t> first_tile;  // [count + 1] and its tiles; none of them has another group's rows
  DevicePtr<const int32_t> sources;     // [rows] where a row lies in x; nullptr: in its own place

  struct Tile {
    int32_t group;
    int32_t begin;
    int32_t end;  // of the group's rows; at or before `begin` where the tile has none
  };

  __device__ __forceinline__ Tile TileOf(int32_t tile, int32_t rows_per_tile) const {
    if (first == nullptr) return Tile{0, tile * rows_per_tile, max_rows};
    if (tile >= first_tile[count]) return Tile{0, 0, 0};
    int32_t low = 0;
    int32_t high = count;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (first_tile[middle] > tile ? high : low) = middle;
    }
    return Tile{low, first[low] + (tile - first_tile[low]) * rows_per_tile, first[low + 1]};
  }

  __device__ __forceinline__ bool HasRow(int64_t row) const { return first == nullptr || row < first[count]; }
  __device__ __forceinline__ int64_t SourceOf(int64_t row) const {
    return sources == nullptr ? row : static_cast<int64_t>(sources[row]);
  }
};

// Rows that a block of a product has where a group has this many on average, on the current device.
int32_t TileRowsOf(LinearFormat format, int64_t rows_per_group);

// Linear, row by row of the groups: p.num_rows is groups.max_rows, and p.packed the first matrix of the groups'. Wants
// Linear's workspace.
Error MultiplyGroups(const LinearParams& p, const RowGroups& groups, void* workspace, Stream stream);

}  // namespace fdsd::cuda
