#pragma once
// State of every thread of the block that runs, new with each block.
#include <vector>

#include "emulation/engine.h"

namespace fdsd::emulation {

template <typename T>
class PerThread {
 public:
  T& Own() {
    const ThreadPlace& here = Here();
    if (block_ != here.block_begin) {
      states_.clear();
      block_ = here.block_begin;
    }
    if (states_.size() <= here.linear) states_.resize(here.linear + 1);
    return states_[here.linear];
  }

 private:
  std::vector<T> states_;
  uint32_t block_ = 0;  // the period it began with
};

}  // namespace fdsd::emulation
