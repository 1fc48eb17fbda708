#include "kvt_states.h"

#include "kvt_blocks.h"
#include "kvt_file.h"
#include "kvt_restore.h"
#include "kvt_wire.h"

#include <cstring>

namespace kvt {

namespace {

constexpr char magic[] = { 'K', 'V', 'T', 'C', 'K', 'P', 'T', '\n' };
constexpr uint32_t version = 1;
constexpr uint64_t most_state_bytes = 1u << 30; // docs/engine-protocol.md

} // namespace

state make_state(const state_head & head, size_t engine_bytes) {
    writer out;
    out.raw(magic, sizeof magic);
    out.u32(version);
    out.u32(head.n_tokens);
    out.u32((uint32_t) head.least);
    out.u32((uint32_t) head.greatest);
    state made;
    made.n_tokens = head.n_tokens;
    made.bytes.resize(state_head_bytes + engine_bytes);
    std::memcpy(made.bytes.data(), out.body().data(), state_head_bytes);
    return made;
}

bool read_head(const std::vector<char> & bytes, uint32_t n_tokens, state_head & head) {
    if (bytes.size() <= state_head_bytes || std::memcmp(bytes.data(), magic, sizeof magic) != 0) {
        return false;
    }
    reader in(bytes.data() + sizeof magic, state_head_bytes - sizeof magic);
    const bool known = in.u32() == version;
    head.n_tokens = in.u32();
    head.least    = (int32_t) in.u32();
    head.greatest = (int32_t) in.u32();
    return known && in.whole() && head.n_tokens == n_tokens && head.least >= 0 && head.least <= head.greatest &&
           (uint32_t) head.greatest < n_tokens;
}

uint32_t read_state(const file & named, lease & held, std::vector<char> & bytes) {
    if (named.kind == file_kind::rows || named.used == 0 || named.used > most_state_bytes || named.used > named.file_bytes) {
        return shortfall_sidecar_error;
    }
    bytes.resize((size_t) named.used);
    return read_segments(named, state_segments(named.used), held, bytes.data());
}

bool write_state(const reserved & named, const char * bytes, size_t count, filled & done) {
    return write_segments(named, bytes, state_segments(count), done);
}

} // namespace kvt
