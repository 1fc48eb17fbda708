#include "kvt_answers.h"

#include "kvt_wire.h"

namespace kvt {

bool unpack(const std::string & body, welcome & answer) {
    reader in(body.data(), body.size());
    const uint32_t spoken = in.u32();
    for (auto & byte : answer.name_space) {
        byte = in.u8();
    }
    answer.block_tokens = in.u32();
    answer.min_tokens = in.u32();
    answer.lease_ms = in.u32();
    answer.reserve_ms = in.u32();
    return in.whole() && spoken == protocol_version;
}

namespace {

bool unpack(reader & in, file_kind & kind) {
    const uint8_t number = in.u8();
    kind = (file_kind) number;
    return number <= (uint8_t) file_kind::window;
}

} // namespace

bool unpack(const std::string & body, matched & answer) {
    reader in(body.data(), body.size());
    answer = {};
    answer.rows = in.u32();
    answer.lease_id = in.u64();
    answer.pending = in.u8() != 0;
    answer.expected_ms = in.u32();
    answer.reason = in.u32();
    answer.at = in.u32();
    bool known = true;
    answer.files.resize(in.count(36));
    for (auto & one : answer.files) {
        one.path = in.text();
        one.file_bytes = in.u64();
        one.payload_offset = in.u32();
        one.first_position = in.u32();
        one.rows = in.u32();
        one.used = in.u64();
        one.tier = in.u8();
        one.crcs = in.numbers();
        known = unpack(in, one.kind) && known;
    }
    return known && in.whole();
}

bool unpack(const std::string & body, planned & answer) {
    reader in(body.data(), body.size());
    answer = {};
    answer.outcome = (plan_outcome) in.u8();
    answer.reason = in.text();
    bool known = true;
    answer.files.resize(in.count(31));
    for (auto & one : answer.files) {
        one.id = in.u64();
        one.path = in.text();
        one.file_bytes = in.u64();
        one.payload_offset = in.u32();
        one.first_position = in.u32();
        one.rows = in.u32();
        known = unpack(in, one.kind) && known;
    }
    return known && in.whole();
}

bool unpack(const std::string & body, std::vector<std::string> & reasons) {
    reader in(body.data(), body.size());
    reasons.assign(in.count(2), {});
    for (auto & reason : reasons) {
        reason = in.text();
    }
    return in.whole();
}

bool unpack_lease(const std::string & body, uint64_t & lease_id) {
    reader in(body.data(), body.size());
    in.u32();
    lease_id = in.u64();
    return in.ok();
}

} // namespace kvt
