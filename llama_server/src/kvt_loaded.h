// The file that a model is loaded from. Its name says nothing sure of what is in it: the sidecar reads it.
#pragma once

#include "kvt_messages.h"

#include <string>

namespace kvt {

// What tells a file from others, and from itself once it is changed; to be taken before it is read. Its path is empty if it is
// not there.
loaded_file look_at(const std::string & path);

} // namespace kvt
