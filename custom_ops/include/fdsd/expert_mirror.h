#pragma once
// Experts that ranks of several hosts share: what keeps a host's segment like that of the others. See
// cpu/runtime/expert_mirror.h. One thread makes all calls of a mirror.
#include "fdsd/call.h"

namespace fdsd {

struct ExpertMirrorOpenParams {
  int32_t file;          // descriptor of the segment; may be closed afterwards
  int32_t host;          // ranks R * host / num_hosts to R * (host + 1) / num_hosts - 1 are on this one
  int32_t num_hosts;     // divides R
  int32_t news;          // eventfd that is written when Collect may have something; stays the caller's
  int32_t* mirror;       // [1] receives the handle, 0 = no rank has opened the segment as yet
  int64_t* frame_bytes;  // [1] receives the bytes of the longest frame
};
CallStatus ExpertMirrorOpen(const ExpertMirrorOpenParams& p);

struct ExpertMirrorHostParams {
  int32_t mirror;
  int32_t host;
};
// A connection with another host begins: all that concerns it is collected anew.
CallStatus ExpertMirrorBegin(const ExpertMirrorHostParams& p);
// It has ended: what waits for ranks of the host waits for them to come back, unless they were about to leave.
CallStatus ExpertMirrorLose(const ExpertMirrorHostParams& p);
// No thread may use it, then or later.
CallStatus ExpertMirrorClose(const ExpertMirrorHostParams& p);

struct ExpertMirrorCollectParams {
  int32_t mirror;
  int32_t host;
  int64_t* num_bytes;  // [1] receives the length of the next frame for the host, 0 = there is none
  void* frame;         // [frame_bytes]
};
CallStatus ExpertMirrorCollect(const ExpertMirrorCollectParams& p);

struct ExpertMirrorApplyParams {
  int32_t mirror;
  int32_t host;  // that has collected the frame
  int64_t num_bytes;
  const void* frame;
};
CallStatus ExpertMirrorApply(const ExpertMirrorApplyParams& p);

}  // namespace fdsd
