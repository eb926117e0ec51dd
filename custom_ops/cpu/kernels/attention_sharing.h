#pragma once
// Which requests of a call begin with the same blocks, as those do that hit the same entries of a prefix cache.
#include <vector>

#include "fdsd/attention.h"

namespace fdsd {

// Requests whose first `num_partitions` partitions lie in the same blocks and are seen whole by all of their rows.
struct SharedPrefix {
  std::vector<int32_t> requests;
  int32_t num_partitions;
};

// Groups worth reading together, each request in one at most. Requests with more rows than `max_rows` are left out:
// they already use every key often. O(R log R) comparisons of block tables, each as long as what the two have in
// common.
std::vector<SharedPrefix> FindSharedPrefixes(const CascadeAppendAttentionParams& p, int32_t max_rows);

}  // namespace fdsd
