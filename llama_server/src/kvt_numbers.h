// Numbers of the engine socket and of the proto. Generated: scripts/gen_cpp_numbers.py
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {

constexpr uint32_t protocol_version = 4;
constexpr char socket_magic[] = { 75, 86, 84, 69, 78, 71, 13, 10 };
constexpr uint32_t most_reply_bytes = 67108864;
constexpr uint32_t block_tokens = 64; // of a block that is full
constexpr uint8_t memory_tier = 1;
constexpr uint16_t keep_connection[] = { 4, 5 }; // failures after which the sidecar keeps the connection

enum class frame_kind : uint16_t {
    hello = 1,
    match = 2,
    wait = 3,
    release = 4,
    plan = 5,
    commit = 6,
    damaged = 7,
    finished = 8,
    welcome = 101,
    matched = 102,
    done = 103,
    planned = 104,
    committed = 105,
    failed = 106,
};

enum class file_kind : uint8_t {
    rows = 0,
    state = 1,
    window = 2,
};

enum class gate_mode : uint8_t {
    measured = 0,
    restore = 1,
    recompute = 2,
};

enum class plan_outcome : uint8_t {
    all = 0,
    more = 1,
    no_room = 2,
    refused = 3,
    later = 4,
    fingerprints = 5,
};

// Why there is not more of a prompt.
enum shortfall : uint32_t {
    shortfall_none = 0,
    shortfall_nothing_stored = 1,
    shortfall_ends = 2,
    shortfall_differs = 3,
    shortfall_too_short = 4,
    shortfall_gate = 5,
    shortfall_recompute = 6,
    shortfall_sidecar_away = 7,
    shortfall_sidecar_late = 8,
    shortfall_sidecar_error = 9,
    shortfall_no_memory = 10,
    shortfall_damaged = 11,
    shortfall_unreadable = 12,
    shortfall_blocks_gone = 13,
    shortfall_files_late = 14,
    shortfall_hanging = 15,
    shortfall_no_cells = 16,
    shortfall_shifted = 17,
    shortfall_memory_gone = 18,
    shortfall_not_looked_up = 19,
    shortfall_not_text = 20,
    shortfall_failed = 21,
    shortfall_window_missing = 22,
    shortfall_state_missing = 23,
    shortfall_unchecked = 24,
};

} // namespace kvt
