#pragma once
// State of every thread of the block that runs, new with each block. T has Clear(), which makes it as new and keeps its
// memory: blocks are many and short.
#include <vector>

#include "emulation/engine.h"

namespace fdsd::emulation {

template <typename T>
class PerThread {
 public:
  T& Own() {
    const ThreadPlace& here = Here();
    if (states_.size() <= here.linear) states_.resize(here.linear + 1);
    State& own = states_[here.linear];
    if (own.block != here.block_begin) {
      own.state.Clear();
      own.block = here.block_begin;
    }
    return own.state;
  }

 private:
  struct State {
    T state;
    uint32_t block = 0;  // the period it began with
  };
  std::vector<State> states_;
};

}  // namespace fdsd::emulation
