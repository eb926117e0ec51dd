// Attention over a cache of half16.
#include "attention_launch.h"

namespace fdsd::cuda {

template Error LaunchOver<half16>(const CascadeAppendAttentionParams&, void*, Stream);

}  // namespace fdsd::cuda
