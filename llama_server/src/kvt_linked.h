// Whether this library is loaded beside the libraries that it was linked against. Names of shared libraries have only the
// major version, so after an update the loader takes others, and no symbol need be missing: it is the layout of what they
// share that has changed.
#pragma once

#include <cstddef>
#include <string>

#include <link.h>

namespace kvt {

// What one library was when this one was linked. `name`: of its file, before ".so". `mark`: "id:" and its build id in hex;
// if it has none, "file:", its size, "-", and the CRC-32C of its bytes in hex.
struct linked {
    const char * name;
    const char * mark;
};

// The linker's name of what an object was built from (NT_GNU_BUILD_ID), as bytes; empty if it has none.
std::string build_id(const dl_phdr_info & object);

// If one of them is loaded and is another, the guard of the tree takes this process's place, which starts what is installed.
// Without a guard, or if it has started this, the process ends with one line and exit code 1. What is not loaded is not asked
// for: the linker leaves out libraries of which nothing is used.
void require_linked(const linked * libraries, size_t count);

} // namespace kvt
