#pragma once
// What programs and uploads launch besides the ops; see fdsd/device.h.
#include "device.h"
#include "fdsd/device.h"

namespace fdsd::cuda {

Error ScatterPieces(const ScatterPiecesParams& p, Stream stream);
Error PadColumns(const PadColumnsParams& p, Stream stream);
Error CopyBlocks(const CopyBlocksParams& p, Stream stream);

}  // namespace fdsd::cuda
