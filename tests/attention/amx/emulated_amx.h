// The tile instructions of AMX in plain C++, for a processor without them: `-include` this file before C++ that has them as
// intrinsics. Also says that the processor has AMX, and that the kernel permits it.
//
// As in Intel's manual (SDM, volume 1, chapter 18): a tile has the rows and bytes a row that the loaded configuration says, what is
// beyond them is zero after each write, and sums wrap around at 32 bits. What the processor would refuse ends the program. An
// intrinsic that is not here compiles to the instruction, which this processor refuses.
#pragma once

#include <immintrin.h> // before the macros below take its names

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1

namespace emulated_amx {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;

struct Config { // what _tile_loadconfig reads
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
    int8_t bytes[ROWS][BYTES];
};

// Of a thread, as the registers are.
inline thread_local Config config{};
inline thread_local Tile tiles[TILES]{};

inline std::atomic<uint64_t> products{0}; // how many products of tiles all threads made

[[noreturn]] inline void refuse(const char * why) {
    std::fprintf(stderr, "emulated AMX: %s\n", why);
    std::abort();
}

inline void require(bool holds, const char * why) {
    if (!holds) refuse(why);
}

inline Tile & tile(int t) {
    require(config.palette == 1, "no configuration is loaded");
    require(t >= 0 && t < TILES, "no such tile");
    require(config.rows[t] != 0 && config.row_bytes[t] != 0, "the configuration leaves this tile out");
    return tiles[t];
}

inline void load_config(const void * from) {
    Config wanted;
    std::memcpy(&wanted, from, sizeof wanted);
    require(wanted.palette == 1 && wanted.start_row == 0, "only palette 1, from row 0");
    for (uint8_t byte : wanted.reserved) require(byte == 0, "a reserved byte is not 0");
    for (int t = 0; t < 16; t++) {
        require(wanted.rows[t] <= (t < TILES ? ROWS : 0), "too many rows");
        require(wanted.row_bytes[t] <= (t < TILES ? BYTES : 0), "rows are too long");
        require((wanted.rows[t] == 0) == (wanted.row_bytes[t] == 0), "rows without bytes, or bytes without rows");
    }
    config = wanted;
    std::memset(tiles, 0, sizeof tiles);
}

inline void store_config(void * to) {
    std::memcpy(to, &config, sizeof config); // all zero where none is loaded
}

inline void load(int t, const void * from, int64_t stride) {
    Tile & to = tile(t);
    to = Tile{};
    for (int row = 0; row < config.rows[t]; row++) {
        std::memcpy(to.bytes[row], (const char *) from + row * stride, config.row_bytes[t]);
    }
}

inline void store(int t, void * to, int64_t stride) {
    const Tile & from = tile(t);
    for (int row = 0; row < config.rows[t]; row++) {
        std::memcpy((char *) to + row * stride, from.bytes[row], config.row_bytes[t]);
    }
}

inline void zero(int t) { tile(t) = Tile{}; }

// c += a b of signed bytes: a row of b has four values of each column.
inline void multiply_signed(int c, int a, int b) {
    Tile & sum = tile(c);
    const Tile &left = tile(a), &right = tile(b);
    require(c != a && c != b && a != b, "the tiles of a product are three");
    require(config.rows[c] == config.rows[a], "sum and left factor differ in their rows");
    require(config.row_bytes[c] == config.row_bytes[b], "sum and right factor differ in their columns");
    require(config.row_bytes[a] == 4 * config.rows[b], "left and right factor do not fit together");
    require(config.row_bytes[c] % 4 == 0, "a column of the sum has four bytes");
    products.fetch_add(1, std::memory_order_relaxed);
    Tile result{};
    for (int m = 0; m < config.rows[c]; m++) {
        for (int n = 0; n < config.row_bytes[c] / 4; n++) {
            uint32_t total;
            std::memcpy(&total, &sum.bytes[m][4 * n], 4);
            for (int k = 0; k < config.row_bytes[a]; k++) {
                total += (uint32_t) ((int32_t) left.bytes[m][k] * (int32_t) right.bytes[k / 4][4 * n + k % 4]);
            }
            std::memcpy(&result.bytes[m][4 * n], &total, 4);
        }
    }
    sum = result;
}

// arch_prctl, by which a process asks for AMX's registers; GGML asks the kernel nothing else in C++.
inline long permit(long, long what, long feature) {
    require(what == 0x1023 && feature == 18, "not the request for tile data");
    return 0;
}

} // namespace emulated_amx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated_amx::load_config(from)
#define _tile_storeconfig(to) emulated_amx::store_config(to)
#define _tile_loadd(t, from, stride) emulated_amx::load(t, from, stride)
#define _tile_stored(t, to, stride) emulated_amx::store(t, to, stride)
#define _tile_zero(t) emulated_amx::zero(t)
#define _tile_dpbssd(c, a, b) emulated_amx::multiply_signed(c, a, b)
#define syscall(number, what, feature) emulated_amx::permit(number, what, feature)
