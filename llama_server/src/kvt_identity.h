// What of an engine's name and environment decides the bits of its rows.
#pragma once

#include <string>
#include <vector>

namespace kvt {

// Name, version and build, where the build is whole however long the version is: it is what tells two engines apart.
std::string engine_name(const std::string & version, const std::string & build);

// Of an environment, "NAME=VALUE" of what may choose other kernels, other sums or another number of threads, in order.
std::vector<std::string> bit_variables(const char * const * environment);

} // namespace kvt
