// What one image is compiled for, and the tile sizes that follow from it. Everything is known at compile time.
#pragma once
#include "rows.cuh"

namespace paged_attn::gpu {

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
constexpr int power_of_two_in(int n, int most) { // the largest power of two that divides n, at most `most`
    int p = 1;
    while (p < most && n % (2 * p) == 0) p *= 2;
    return p;
}

// ROWS: rows (queries x heads of a group) of one decode block, 1..8. ALIGN: bytes that addresses and strides of blocked
// rows are multiples of, 4 or 2; 16 without blocked types, as f16 and bf16 rows always have. ARCH: compute capability
// x 10.
template <int D_K_, int D_V_, RowType K_TYPE, RowType V_TYPE, int ROWS, int ALIGN, int ARCH> struct Instance {
    static constexpr int kDK = D_K_, kDV = D_V_, kRows = ROWS, kAlign = ALIGN, kArch = ARCH;
    static constexpr RowType kK = K_TYPE, kV = V_TYPE;
    static constexpr int kDMax = max_of(kDK, kDV);
    static constexpr bool kAsync = ARCH >= 80;
    static constexpr bool kBf16Mma = ARCH >= 80;
    // bf16 has no tensor cores before sm_80; a head of more than 256 values has no room for its sums
    static constexpr bool kHasMma = ARCH >= 75 && kDMax <= 256 && (kBf16Mma || (K_TYPE != kBf16 && V_TYPE != kBf16));
    static_assert(ROWS >= 1 && ROWS <= 8, "rows of a decode block");
    static_assert(ALIGN == 16 || ((is_blocked(K_TYPE) || is_blocked(V_TYPE)) && (ALIGN == 4 || ALIGN == 2)),
                  "alignment");
};

// ---- decode: 128 threads, one K/V head, one split, up to 8 rows
template <class I> struct DecodeTile {
    static constexpr int kThreads = 128;
    static constexpr bool kStaged = I::kAsync && I::kAlign >= 4;
    // scores: kLanes neighbouring threads share a cell, kRounds units each; a thread takes kCells cells
    static constexpr int kUnitsK = I::kDK / 8;
    static constexpr int kLanes = power_of_two_in(kUnitsK, 8);
    static constexpr int kRounds = kUnitsK / kLanes;
    static constexpr int kGroupsK = kThreads / kLanes;
    // Cells of a tile. Staged, three of them and all else of a block are to fit twice into the 100 KiB of a multiprocessor
    // of 8.6, 8.9 and 12.0; in registers, what is under way is to hide the latency of memory.
    static constexpr int kTileWanted = kStaged ? (I::kDMax <= 64 ? 64 : I::kDMax <= 128 ? 32 : 16)
                                               : (I::kDMax <= 128 ? 64 : I::kDMax <= 256 ? 32 : 16);
    static constexpr int kTile = max_of(kTileWanted, kGroupsK);
    static constexpr int kCells = kTile / kGroupsK;
    // sums: kUnitsV neighbouring threads share a cell, one unit each; threads beyond kGroupsV * kUnitsV rest
    static constexpr int kUnitsV = I::kDV / 8;
    static constexpr int kGroupsV = kThreads / kUnitsV;
    static constexpr int kCellsV = divide_up(kTile, kGroupsV);
    static constexpr int kPiecesK = kCells * kRounds, kPiecesV = kCellsV;
    static constexpr int kStages = 3; // K and V of a tile are a stage each
    static constexpr int kRowsPadded = I::kRows <= 2 ? I::kRows : divide_up(I::kRows, 4) * 4;
    static_assert(kCells >= 1 && kCells * kGroupsK == kTile, "every cell of a tile has its threads");

    // shared memory, bytes from its start
    static constexpr int kQuery = 0;                                                  // f32 [rows][2][units of K][4]
    static constexpr int kScores = kQuery + I::kRows * I::kDK * 4;                    // f32 [rows][tile]
    static constexpr int kWeights = kScores + I::kRows * kTile * 4;                   // f32 [tile][rows padded]
    static constexpr int kRescale = kWeights + kTile * kRowsPadded * 4;               // f32 [8]
    static constexpr int kPieces = divide_up(kRescale + 32, 16) * 16;                 // Piece [stages][pieces][threads]
    static constexpr int kStageBytes = max_of(kPiecesK, kPiecesV) * kThreads * 16;
    static constexpr int kSums = kPieces; // f32 [groups of V][d_v], at the end, when the pieces are used
    static constexpr int kShared = kPieces + max_of(kStaged ? kStages * kStageBytes : 0, kGroupsV * I::kDV * 4);
};

// ---- on tensor cores: 16 rows per row warp; cell warps share a tile's cells
template <class I, bool WIDE> struct MmaTile {
    static constexpr bool kLarge = I::kDMax > 128;
    static constexpr bool kTight = I::kArch == 75; // 64 KiB of shared memory in all
    static constexpr int kRowWarps = !WIDE ? 1 : kLarge ? 2 : 4;
    static constexpr int kCellWarps = !WIDE ? (kLarge ? 2 : 4) : kLarge && !(kTight && I::kDMax > 192) ? 2 : 1;
    static constexpr int kWarps = kRowWarps * kCellWarps, kThreads = 32 * kWarps;
    static constexpr int kRows = 16 * kRowWarps;
    static constexpr int kCells = WIDE && kCellWarps == 1 && !kLarge ? 32 : 16; // of a warp
    static constexpr int kTile = kCells * kCellWarps;
    static constexpr bool kAsyncK = I::kAsync && !is_blocked(I::kK), kAsyncV = I::kAsync && !is_blocked(I::kV);
    static constexpr bool kSumsApart = !kLarge;           // a tile's sums are added to the state's, not summed in it
    static constexpr int kParts = I::kK == kBf16 ? 3 : 2; // 16-bit parts of a query value
    static constexpr int kBuffers = 3;                    // K and V of a tile are a buffer each
    static constexpr int kStride = I::kDMax + 8;          // 16-bit values; no bank conflicts
    static constexpr int kScaleBlocks = I::kDMax / 32;

    static constexpr int kQuery = 0;                                           // 16-bit [parts][rows][d_k + 8]
    static constexpr int kBuffer = kQuery + kParts * kRows * (I::kDK + 8) * 2; // 16-bit [buffers][tile][stride]
    static constexpr int kBufferBytes = kTile * kStride * 2;
    static constexpr int kUsedBuffers = I::kAsync && !(kLarge && kParts == 3) ? kBuffers : 2;
    static constexpr int kScales = kBuffer + kUsedBuffers * kBufferBytes; // f32 [buffers][blocks][tile]
    static constexpr int kScaleBytes = is_blocked(I::kK) || is_blocked(I::kV) ? kScaleBlocks * kTile * 4 : 0;
    static constexpr int kStates = kScales + kUsedBuffers * kScaleBytes;
    // cell warps meet at the end where the query and the buffers were
    static constexpr int kMergeBytes = kRowWarps * (kCellWarps - 1) * 16 * (I::kDV + 2) * 4;
    static constexpr int kShared = max_of(kStates, kMergeBytes);
};

// ---- plain f32: 128 threads
template <class I> struct FmaTile {
    static constexpr int kThreads = 128;
    static constexpr int kRows = I::kDMax <= 128 ? 32 : I::kDMax <= 256 ? 16 : 8;
    static constexpr int kTile = kRows;                                   // cells
    static constexpr int kStrideQ = I::kDK + 4, kStrideKV = I::kDMax + 4; // f32; no bank conflicts
    // scores: kRowSteps x kCellSteps of a thread; sums: kSumRows rows x 8 values of a thread
    static constexpr int kCellThreads = 8, kRowThreads = kThreads / kCellThreads; // 8 x 16
    static constexpr int kCellSteps = divide_up(kTile, kCellThreads), kRowSteps = divide_up(kRows, kRowThreads);
    static constexpr int kUnitsV = I::kDV / 8;
    static constexpr int kSumGroups = kThreads / kUnitsV;
    static constexpr int kSumRows = divide_up(kRows, kSumGroups);
    static constexpr int kQuery = 0;                                   // f32 [rows][d_k + 4]
    static constexpr int kKeys = kQuery + kRows * kStrideQ * 4;        // f32 [tile][d + 4], K then V
    static constexpr int kScores = kKeys + kTile * kStrideKV * 4;      // f32 [rows][tile + 1]
    static constexpr int kRescale = kScores + kRows * (kTile + 1) * 4; // f32 [rows]
    static constexpr int kShared = kRescale + kRows * 4;
};

} // namespace paged_attn::gpu
