#pragma once
#include "device.h"
#include "fdsd/activation.h"

namespace fdsd::cuda {

// Swiglu of the first num_rows[0] rows, a number that only the device knows, of p.num_rows at most; nullptr: of all.
Error SwigluFirstRows(const SwigluParams& p, DevicePtr<const int32_t> num_rows, Stream stream);

// The same of rows that belong to experts: expert e has rows [first[e], first[e + 1]), and adds its bias to them.
struct ExpertRows {
  DevicePtr<const int32_t> first;  // [L + 1]
  int32_t num_experts;             // L
  DevicePtr<const float> bias;     // [L, 2 * I], may be nullptr
  float gate_limit;                // see MoeFfnParams
};
Error SwigluExpertRows(const SwigluParams& p, const ExpertRows& rows, Stream stream);

}  // namespace fdsd::cuda
