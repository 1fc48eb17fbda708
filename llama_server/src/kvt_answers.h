// Bodies of the sidecar's answers as values (docs/engine-protocol.md). False for what is none.
#pragma once

#include "kvt_messages.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

bool unpack(const std::string & body, welcome & answer);
bool unpack(const std::string & body, matched & answer);
bool unpack(const std::string & body, planned & answer);
bool unpack(const std::string & body, std::vector<std::string> & reasons);

// Of a MATCHED its lease alone: who renews it knows the files, and they may be thousands.
bool unpack_lease(const std::string & body, uint64_t & lease_id);

} // namespace kvt
