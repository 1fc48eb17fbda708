// The files that a server computes with. Their names say nothing sure of what is in them: the sidecar reads them.
#pragma once

#include "kvt_messages.h"

#include <cstddef>
#include <string>
#include <vector>

namespace kvt {

constexpr size_t most_files = 64; // of one server, that the sidecar reads

// What tells a file from others, and from itself once it is changed; to be taken before it is read. Its path is empty if it is
// not there.
loaded_file look_at(const std::string & path);

// The files of the model that is loaded from this one, in their order: all that it was split into. llama.cpp finds them by the name
// of the first, too, and loads no model whose parts are called otherwise.
std::vector<std::string> part_paths(const std::string & path);

// One of them.
struct used_file {
    std::string what; // "model", "projector" …
    loaded_file file;
};
using used_files = std::vector<used_file>;

// Why nobody knows what is in memory: empty if all files are there, and as they were before they were loaded.
std::string why_changed(const used_files & before, const used_files & now);

} // namespace kvt
