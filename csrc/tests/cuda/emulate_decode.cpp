// Instances of the decode kernel: every data type, head size and way of loading.
#include "emulated.h"

namespace paged_attn::gpu::test {
namespace {

const CaseSpec kCausal = {}, kLong = {2, 5, 1, 333, 64, MaskKind::causal, 0, true, false, 3, 1};
const CaseSpec kTwoHeads = {3, 4, 2, 150, 50, MaskKind::sequences, 0, false, false, 2, 1};
const CaseSpec kWindow = {4, 7, 1, 290, 16, MaskKind::window, 0, true, false, 2, 1};
const CaseSpec kDense = {2, 3, 1, 97, 97, MaskKind::dense, 0, true, true, 1, 1};
const CaseSpec kCapped = {1, 8, 1, 130, 33, MaskKind::none, 20, false, false, 4, 1};
const CaseSpec kHidden_ = {1, 2, 1, 70, 32, MaskKind::hidden, 0, false, false, 2, 1};
const CaseSpec kSolid = {3, 4, 1, 300, 64, MaskKind::solid}, kSolidWindow = {2, 4, 1, 400, 128, MaskKind::solid_window};
const CaseSpec kSolidSequences = {1, 4, 1, 300, 100, MaskKind::solid_sequences};
const CaseSpec kNothing = {1, 2, 1, 0, 32, MaskKind::none, 0, true, false, 1, 1},
               kOne = {1, 1, 1, 1, 1, MaskKind::none};

const bool added[] = {
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 52>>(
        "decode 128 f16 registers", Kernel::decode,
        {kCausal, kLong, kTwoHeads, kWindow, kDense, kCapped, kHidden_, kNothing, kOne, kSolid, kSolidWindow, kSolidSequences}),
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 80>>(
        "decode 128 f16 staged", Kernel::decode,
        {kCausal, kLong, kTwoHeads, kWindow, kDense, kCapped, kHidden_, kNothing, kOne, kSolid, kSolidWindow, kSolidSequences}),
    Add::instance<Instance<64, 64, kBf16, kF16, 8, 16, 80>>("decode 64 bf16/f16", Kernel::decode, {kCapped, kWindow}),
    Add::instance<Instance<80, 80, kF16, kBf16, 3, 16, 80>>("decode 80 f16/bf16", Kernel::decode, {kLong, kDense}),
    Add::instance<Instance<96, 96, kQ8, kQ8, 2, 2, 80>>("decode 96 q8_0 by halves", Kernel::decode, {kLong, kHidden_}),
    Add::instance<Instance<96, 96, kQ4, kF16, 2, 2, 61>>("decode 96 q4_0/f16 by halves", Kernel::decode, {kTwoHeads}),
    Add::instance<Instance<112, 112, kF16, kF16, 1, 16, 61>>("decode 112 f16", Kernel::decode, {kTwoHeads, kOne}),
    Add::instance<Instance<128, 128, kQ8, kQ4, 4, 4, 80>>("decode 128 q8_0/q4_0", Kernel::decode, {kLong, kTwoHeads}),
    Add::instance<Instance<128, 128, kQ4, kQ8, 7, 4, 52>>("decode 128 q4_0/q8_0", Kernel::decode, {kWindow, kLong}),
    Add::instance<Instance<192, 128, kBf16, kQ8, 6, 4, 86>>("decode 192/128 bf16/q8_0", Kernel::decode, {kLong}),
    Add::instance<Instance<256, 256, kF16, kF16, 8, 16, 70>>("decode 256 f16", Kernel::decode, {kWindow}),
    Add::instance<Instance<576, 512, kF16, kF16, 8, 16, 80>>("decode 576/512 f16", Kernel::decode, {kCapped}),
};

} // namespace
} // namespace paged_attn::gpu::test
