#include "fdsd/cast.h"

#include "simd.h"
#include "thread_pool.h"

namespace fdsd {
namespace FDSD_ISA {
namespace {

template <typename From, typename To>
void CastRow(const CastParams& p, int64_t row) {
  const From* x = static_cast<const From*>(p.x) + row * p.num_columns;
  To* y = static_cast<To*>(p.y) + row * p.num_columns;
  const int full = p.num_columns / kLanes * kLanes;
  for (int i = 0; i < full; i += kLanes) Store(Load(x + i), y + i);
  const int rest = p.num_columns - full;
  if (rest > 0) StorePartial(LoadPartial(x + full, rest), y + full, rest);
}

template <typename From>
void CastRowFrom(const CastParams& p, int64_t row) {
  if (p.y_dtype == DType::kFloat32) {
    CastRow<From, float>(p, row);
  } else {
    CastRow<From, bf16>(p, row);
  }
}

}  // namespace

Error Cast(const CastParams& p) {
  if (p.num_rows < 0) return "num_rows: expected 0 or more, got a negative number";
  if (p.num_columns < 0) return "num_columns: expected 0 or more, got a negative number";
  ParallelForRows(p.num_rows, p.num_columns * int64_t{6}, [&](int64_t row) {
    if (p.x_dtype == DType::kFloat32) {
      CastRowFrom<float>(p, row);
    } else {
      CastRowFrom<bf16>(p, row);
    }
  });
  return nullptr;
}

}  // namespace FDSD_ISA
}  // namespace fdsd
