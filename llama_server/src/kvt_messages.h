// The messages of the engine socket as values (docs/engine-protocol.md).
#pragma once

#include "kvt_numbers.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvt {

// One layer of one of the model's caches. A row of 0 bytes: the layer has none.
struct layer {
    uint16_t child = 0;
    uint16_t index = 0;
    uint8_t kind = 0; // 0 full, 1 sliding window, 2 chunked
    uint32_t window = 0;
    uint32_t kv_heads = 0;
    uint32_t k_head_dim = 0;
    uint32_t v_head_dim = 0;
    uint32_t k_row_bytes = 0;
    uint32_t v_row_bytes = 0;
};

// A file that was loaded, and what stat() said of it before the first byte was read.
struct loaded_file {
    std::string path; // absolute; empty: it was not there
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t size = 0;
    int64_t mtime_ns = 0;
    int64_t ctime_ns = 0;

    bool operator==(const loaded_file & other) const {
        return path == other.path && device == other.device && inode == other.inode && size == other.size &&
               mtime_ns == other.mtime_ns && ctime_ns == other.ctime_ns;
    }
};

// What the engine is, and what decides the bits of its rows.
struct hello {
    std::vector<std::pair<std::string, std::string>> fields; // model, engine, flash_attention …
    std::vector<layer> layers;                               // in the order of (child, index)
    std::string k_dtype = "f16";
    std::string v_dtype = "f16";
    bool states = false;     // it resumes at checkpoints only
    gate_mode gate = gate_mode::measured;
    uint32_t min_tokens = 0; // 0: as the sidecar's settings say
    uint32_t window_row_bytes = 0; // of a position, in all layers that keep only the last rows; 0: no windows are stored
    uint32_t window_least = 0;     // rows before a position without which the engine does not go on there
    uint32_t window_most = 0;      // that it keeps
    std::vector<loaded_file> files; // that it computes with, the model first
    std::string unsupported; // why the model is not tiered: the sidecar is told, and not asked
};

// The answer to it.
struct welcome {
    std::array<uint8_t, 32> name_space {};
    uint32_t block_tokens = 0;
    uint32_t min_tokens = 0;
    uint32_t lease_ms = 0;
    uint32_t reserve_ms = 0;
};

// What else than a token stands at a position, such as an image.
struct extra {
    uint32_t position = 0;
    std::array<uint8_t, 32> digest {};
};

// A file that the sidecar names.
struct file {
    std::string path;
    uint64_t file_bytes = 0;
    uint32_t payload_offset = 0;
    uint32_t first_position = 0; // of a state: how many tokens were computed when it was made
    uint32_t rows = 0;           // of the block; of a state 0
    uint64_t used = 0;           // of the rows, that the prompt wants; of a state or a window its bytes
    uint8_t tier = 0;            // memory_tier, 2 local disk
    std::vector<uint32_t> crcs;  // of every segment
    file_kind kind = file_kind::rows;
};

// What of a prompt can be had.
struct matched {
    uint32_t rows = 0; // positions 0 to rows - 1; 0: nothing is gained
    uint64_t lease_id = 0;
    bool pending = false; // wait() gives the files
    uint32_t expected_ms = 0;
    uint32_t reason = 0; // Shortfall of block_store.proto
    uint32_t at = 0;
    std::vector<file> files;
};

// A checkpoint that could be stored.
struct state_offer {
    uint32_t n_tokens = 0;
    uint64_t bytes = 0;
};

// A file to be filled, its segments only.
struct reserved {
    uint64_t id = 0;
    std::string path;
    uint64_t file_bytes = 0;
    uint32_t payload_offset = 0;
    uint32_t first_position = 0; // of a state: its n_tokens
    uint32_t rows = 0;           // of a state 0
    file_kind kind = file_kind::rows;
};

struct planned {
    plan_outcome outcome = plan_outcome::all;
    std::string reason;
    std::vector<reserved> files;
};

struct filled {
    uint64_t id = 0;
    std::vector<uint32_t> crcs;
};

// A request that has ended.
struct finished {
    uint32_t prompt_tokens = 0;
    uint32_t memory_tokens = 0;
    uint32_t restored_tokens = 0;
    uint32_t reason = 0;
    uint32_t at = 0;
    uint32_t beside_tokens = 0; // computed meanwhile, of all requests
    uint64_t restored_bytes = 0;
    double prefill_seconds = 0;
    double lookup_seconds = 0;
    double fetch_seconds = 0;
    double copy_seconds = 0;
    uint32_t failures = 0;    // calls that failed so far, beside those of the connection that reports it
    uint32_t expected_ms = 0; // what the tier was expected to take for its files
};

} // namespace kvt
