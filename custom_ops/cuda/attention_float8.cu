// Attention over a cache of float8.
#include "attention_launch.h"

namespace fdsd::cuda {

template Error LaunchOver<float8>(const CascadeAppendAttentionParams&, void*, Stream);

}  // namespace fdsd::cuda
