// Attention over a cache of float.
#include "attention_launch.h"

namespace fdsd::cuda {

template Error LaunchOver<float>(const CascadeAppendAttentionParams&, void*, Stream);

}  // namespace fdsd::cuda
