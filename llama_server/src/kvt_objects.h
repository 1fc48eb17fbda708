// Which code is in this process's memory. A driver that compiles its kernels may have any name, and may bring a compiler: of
// what is not known to compute nothing, the bits of rows may depend on it.
#pragma once

#include <string>
#include <vector>

namespace kvt {

// A library that computes no row, by its file's name.
bool computes_nothing(const std::string & name);

// The program and all other libraries, "name=mark", in order. A mark is what the linker says that it was built from, as bytes;
// where that is not said, size and checksum of the code.
std::vector<std::string> loaded_objects();

} // namespace kvt
