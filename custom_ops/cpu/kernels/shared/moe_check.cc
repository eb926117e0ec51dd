#include "moe_check.h"

namespace fdsd {

Error CheckRouter(const MoeFfnParams::Router& router, int32_t num_experts) {
  if (router.top_k < 1 || router.top_k > num_experts) return "top_k: expected 1..num_experts, got a number outside";
  if (router.num_groups < 1 || router.num_groups > kMaxExpertGroups || num_experts % router.num_groups != 0)
    return "num_groups: expected 1..32 that divide num_experts, got another number";
  if (router.num_chosen_groups < 1 || router.num_chosen_groups > router.num_groups)
    return "num_chosen_groups: expected 1..num_groups, got a number outside";
  const int32_t group_size = num_experts / router.num_groups;
  if (router.num_groups > 1 && group_size < 2) return "num_groups: expected groups of two experts or more, got smaller";
  if (router.top_k > int64_t{group_size} * router.num_chosen_groups)
    return "top_k: expected at most the experts of the chosen groups, got more";
  return nullptr;
}

}  // namespace fdsd
