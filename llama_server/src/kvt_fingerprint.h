// Which rows a block has, where its tokens do not say it: they may have been computed alone or in a batch of any size, and rows of
// two histories never belong together. Told by the checksums of the block's segments (docs/engine-protocol.md, "Fingerprints").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

using fingerprint = uint64_t; // its bytes, little endian

fingerprint fingerprint_of(const std::vector<uint32_t> & crcs);

// Of a block in memory whose segments of these sizes lie one after the other.
fingerprint fingerprint_of(const char * data, const std::vector<size_t> & segments);

} // namespace kvt
