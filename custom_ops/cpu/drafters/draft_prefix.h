#pragma once
// Drafts of a row that are certain, which what is offered for it follows. Knows no policy.
#include <cstdint>

#include "fdsd/controller.h"

namespace fdsd {

// The source of a chain that is a prefix and nothing behind it.
constexpr int32_t kPrefixOnly = -1;

struct DraftPrefix {
  const int32_t* token_ids = nullptr;
  const int8_t* sources = nullptr;
  int32_t count = 0;

  DraftPrefix(const ControllerRowsParams& x, int32_t r) {
    if (x.cu_num_prefix == nullptr) return;
    token_ids = x.prefix_token_ids + x.cu_num_prefix[r];
    sources = x.prefix_sources + x.cu_num_prefix[r];
    count = x.cu_num_prefix[r + 1] - x.cu_num_prefix[r];
  }

  static Error Check(const ControllerRowsParams& x) {
    if (x.cu_num_prefix == nullptr) return nullptr;
    if (x.cu_num_prefix[0] != 0) return "cu_num_prefix: expected to start at 0, got another";
    for (int32_t r = 0; r < x.num_rows; ++r)
      if (x.cu_num_prefix[r + 1] < x.cu_num_prefix[r]) return "cu_num_prefix: expected rising offsets, got a decrease";
    return nullptr;
  }
};

}  // namespace fdsd
