// Attention over a cache of bf16.
#include "attention_launch.h"

namespace fdsd::cuda {

template Error LaunchOver<bf16>(const CascadeAppendAttentionParams&, void*, Stream);

}  // namespace fdsd::cuda
