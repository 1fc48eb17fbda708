// Instances of the tile kernels: tensor cores of sm_75 and sm_80, plain f32.
#include "emulated.h"

namespace paged_attn::gpu::test {
namespace {

const CaseSpec kNarrow = {2, 8, 1, 333, 64, MaskKind::causal, 0, true, false, 3, 1};
const CaseSpec kWide = {23, 10, 2, 150, 32, MaskKind::causal, 0, false, false, 1, 1};
const CaseSpec kChunks = {13, 5, 1, 260, 32, MaskKind::window, 0, true, false, 1, 3};
const CaseSpec kSequences = {17, 3, 1, 130, 50, MaskKind::sequences, 0, false, false, 2, 1};
const CaseSpec kDense = {9, 2, 1, 97, 97, MaskKind::dense, 30, true, false, 1, 1};
const CaseSpec kPeaked = {6, 4, 1, 140, 32, MaskKind::causal, 0, false, true, 1, 2};
const CaseSpec kHidden_ = {3, 5, 1, 70, 32, MaskKind::hidden, 0, false, false, 2, 1};
// long enough for sums that are rounded towards zero to show
const CaseSpec kLong = {1, 8, 1, 4000, 500, MaskKind::none, 0, false, false, 1, 1};
const CaseSpec kSinkTail = {2, 4, 1, 1200, 300, MaskKind::none, 0, false, false, 1, 1, 18.0f};
const CaseSpec kSolid = {3, 4, 1, 300, 64, MaskKind::solid}, kSolidWindow = {12, 3, 1, 400, 128, MaskKind::solid_window};
const CaseSpec kSolidSequences = {1, 4, 1, 300, 100, MaskKind::solid_sequences};
const CaseSpec kNothing = {4, 4, 1, 0, 32, MaskKind::none, 0, true, false, 1, 1};

const bool added[] = {
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 80>>("narrow 128 f16 sm_80", Kernel::narrow,
                                                             {kNarrow, kDense, kPeaked, kHidden_, kNothing, kLong, kSinkTail}),
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 80>>(
        "wide 128 f16 sm_80", Kernel::wide,
        {kWide, kChunks, kSequences, kDense, kPeaked, kHidden_, kNothing, kSolid, kSolidWindow, kSolidSequences}),
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 75>>("narrow 128 f16 sm_75", Kernel::narrow,
                                                             {kNarrow, kPeaked}),
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 75>>("wide 128 f16 sm_75", Kernel::wide,
                                                             {kWide, kChunks, kSinkTail}),
    Add::instance<Instance<128, 128, kQ8, kQ4, 5, 4, 75>>("wide 128 q8_0/q4_0 sm_75", Kernel::wide,
                                                          {kWide, kSinkTail}),
    Add::instance<Instance<128, 128, kQ8, kQ8, 5, 4, 80>>("narrow 128 q8_0 sm_80", Kernel::narrow, {kNarrow, kPeaked, kSinkTail}),
    Add::instance<Instance<64, 64, kQ4, kBf16, 5, 4, 80>>("wide 64 q4_0/bf16 sm_80", Kernel::wide, {kWide, kChunks}),
    Add::instance<Instance<96, 96, kF16, kQ8, 5, 2, 80>>("wide 96 f16/q8_0 by halves", Kernel::wide, {kSequences}),
    Add::instance<Instance<80, 80, kBf16, kF16, 5, 16, 80>>("wide 80 bf16/f16 sm_80", Kernel::wide, {kWide, kPeaked}),
    Add::instance<Instance<112, 112, kF16, kF16, 5, 16, 80>>("narrow 112 f16 sm_80", Kernel::narrow, {kNarrow}),
    Add::instance<Instance<256, 256, kF16, kF16, 5, 16, 80>>("wide 256 f16 sm_80", Kernel::wide, {kWide, kChunks}),
    Add::instance<Instance<256, 256, kF16, kF16, 5, 16, 75>>("wide 256 f16 sm_75", Kernel::wide, {kWide}),
    Add::instance<Instance<256, 256, kBf16, kBf16, 5, 16, 86>>("wide 256 bf16 sm_86", Kernel::wide, {kWide}),
    Add::instance<Instance<192, 128, kQ8, kF16, 5, 4, 80>>("narrow 192/128 q8_0/f16", Kernel::narrow, {kNarrow}),
    Add::instance<Instance<128, 128, kF16, kF16, 5, 16, 52>>(
        "wide 128 f16 plain", Kernel::wide,
        {kWide, kChunks, kSequences, kDense, kPeaked, kHidden_, kNothing, kSolid, kSolidWindow, kSolidSequences}),
    Add::instance<Instance<64, 64, kQ8, kQ4, 5, 4, 61>>("wide 64 q8_0/q4_0 plain", Kernel::wide, {kWide}),
    Add::instance<Instance<80, 80, kBf16, kBf16, 5, 16, 75>>("wide 80 bf16 plain", Kernel::wide, {kWide}),
    Add::instance<Instance<256, 256, kQ4, kF16, 5, 4, 70>>("wide 256 q4_0/f16 plain", Kernel::wide, {kChunks}),
    Add::instance<Instance<576, 512, kF16, kF16, 5, 16, 80>>("wide 576/512 f16 plain", Kernel::wide, {kNarrow}),
};

} // namespace
} // namespace paged_attn::gpu::test
