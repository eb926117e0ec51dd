// Attention over a cache of int8_t.
#include "attention_launch.h"

namespace fdsd::cuda {

template Error LaunchOver<int8_t>(const CascadeAppendAttentionParams&, void*, Stream);

}  // namespace fdsd::cuda
