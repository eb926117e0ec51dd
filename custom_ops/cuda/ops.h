#pragma once
// The ops that have a CUDA kernel. Each takes the CPU op's params, with pointers to device memory, and a stream. Some
// also take device memory for what lies between two kernels: at least <op>WorkspaceBytes(p) of it, aligned to 128. How
// much that is follows from sizes alone.
//
// An op checks its sizes, launches and returns: it neither waits nor allocates, so it can be captured in a graph. It
// cannot check what is in the arrays (token ids, offsets, slots) without waiting. The code that fills them checks that
// on the host, and the emulation finds what does not hold. A row's bits depend neither on the other rows nor on their
// number.
//
// KeepHidden writes the hidden state buffers, MtpHold stores a step's drafts for the next step, and SettleStep resolves
// lengths that were unknown when a step was prepared.
#include "device.h"
#include "fdsd/activation.h"
#include "fdsd/attention.h"
#include "fdsd/batch.h"
#include "fdsd/cast.h"
#include "fdsd/collective.h"
#include "fdsd/experts.h"
#include "fdsd/gated_delta.h"
#include "fdsd/linear.h"
#include "fdsd/lora.h"
#include "fdsd/moe.h"
#include "fdsd/mtp.h"
#include "fdsd/ngram.h"
#include "fdsd/norm.h"
#include "fdsd/sampling.h"

namespace fdsd::cuda {

Error AddSilu(const AddSiluParams& p, Stream stream);
Error AllGather(const AllGatherParams& p, Stream stream);
Error AllReduce(const AllReduceParams& p, Stream stream);
Error AppendTokens(const AppendTokensParams& p, Stream stream);
Error BiasGelu(const BiasGeluParams& p, Stream stream);
Error CascadeAppendAttention(const CascadeAppendAttentionParams& p, void* workspace, Stream stream);
Error Cast(const CastParams& p, Stream stream);
Error CombineExperts(const CombineExpertsParams& p, void* workspace, Stream stream);
Error ConcatColumns(const ConcatColumnsParams& p, Stream stream);
Error CompactKv(const CompactKvParams& p, Stream stream);
Error CompactRows(const CompactRowsParams& p, Stream stream);
Error ConcatRmsNorm(const ConcatRmsNormParams& p, Stream stream);
Error DispatchExperts(const DispatchExpertsParams& p, void* workspace, Stream stream);
Error FindSharedPrefixes(const FindSharedPrefixesParams& p, void* workspace, Stream stream);
Error Geglu(const GegluParams& p, Stream stream);
Error GatedDeltaNet(const GatedDeltaNetParams& p, Stream stream);
Error GatherColumns(const GatherColumnsParams& p, Stream stream);
Error GatherOutputRows(const GatherOutputRowsParams& p, Stream stream);
Error GatherWeightRows(const GatherWeightRowsParams& p, Stream stream);
Error GroupSlots(const GroupSlotsParams& p, Stream stream);
Error RowRequests(const RowRequestsParams& p, Stream stream);
Error HeadLinear(const HeadLinearParams& p, void* workspace, Stream stream);
Error KeepHidden(const KeepHiddenParams& p, Stream stream);
Error Linear(const LinearParams& p, void* workspace, Stream stream);
Error LoraExpand(const LoraExpandParams& p, Stream stream);
Error LoraShrink(const LoraShrinkParams& p, Stream stream);
Error MoeFfn(const MoeFfnParams& p, void* workspace, Stream stream);
Error MtpHold(const MtpHoldParams& p, Stream stream);
Error MtpPlan(const MtpPlanParams& p, Stream stream);
Error MtpPostprocess(const MtpPostprocessParams& p, void* workspace, Stream stream);
Error MtpPreprocess(const MtpPreprocessParams& p, Stream stream);
Error NgramMatch(const NgramMatchParams& p, void* workspace, Stream stream);
Error PackIntegers(const PackIntegersParams& p, Stream stream);
Error PackLinear(const PackLinearParams& p, Stream stream);
Error PrepareBatch(const PrepareBatchParams& p, Stream stream);
Error ProcessLogits(const ProcessLogitsParams& p, Stream stream);
Error RmsNorm(const RmsNormParams& p, Stream stream);
Error RopeStoreKv(const RopeStoreKvParams& p, Stream stream);
Error RopeStoreLatent(const RopeStoreLatentParams& p, Stream stream);
Error Sample(const SampleParams& p, void* workspace, Stream stream);
Error SettleStep(const SettleStepParams& p, Stream stream);
Error SigmoidGate(const SigmoidGateParams& p, Stream stream);
Error Softcap(const SoftcapParams& p, Stream stream);
Error Swiglu(const SwigluParams& p, Stream stream);
Error TargetStep(const TargetStepParams& p, Stream stream);
Error TokenLogprobs(const TokenLogprobsParams& p, void* workspace, Stream stream);
Error TopPCandidates(const TopPCandidatesParams& p, void* workspace, Stream stream);
Error VerifyDraftTokens(const VerifyDraftTokensParams& p, Stream stream);

int64_t CascadeAppendAttentionWorkspaceBytes(const CascadeAppendAttentionParams& p);
int64_t CombineExpertsWorkspaceBytes(const CombineExpertsParams& p);
int64_t DispatchExpertsWorkspaceBytes(const DispatchExpertsParams& p);
int64_t FindSharedPrefixesWorkspaceBytes(const FindSharedPrefixesParams& p);
int64_t HeadLinearWorkspaceBytes(const HeadLinearParams& p);
int64_t LinearWorkspaceBytes(const LinearParams& p);
int64_t MoeFfnWorkspaceBytes(const MoeFfnParams& p);
int64_t MtpPostprocessWorkspaceBytes(const MtpPostprocessParams& p);
int64_t NgramMatchWorkspaceBytes(const NgramMatchParams& p);
int64_t SampleWorkspaceBytes(const SampleParams& p);
int64_t TokenLogprobsWorkspaceBytes(const TokenLogprobsParams& p);
int64_t TopPCandidatesWorkspaceBytes(const TopPCandidatesParams& p);

}  // namespace fdsd::cuda
