// What of this program's environment decides bits, a line each; then, for each argument, the engine's name with it as a version.
// With the argument "--objects": what code is in its memory; with "--computing": what of it may decide bits, if it were our library.
#include "../src/kvt_identity.h"
#include "../src/kvt_objects.h"

#include <iostream>
#include <string>

#include <unistd.h>

static void main_of() {}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "--objects" || what == "--computing") {
        const auto ours = reinterpret_cast<const void *>(&main_of);
        for (const auto & one : what == "--objects" ? kvt::loaded_objects() : kvt::computing_objects(ours)) {
            for (const char byte : one) { // a mark is bytes
                std::cout << (byte > ' ' && byte <= '~' ? std::string(1, byte) : "%" + std::to_string((unsigned char) byte));
            }
            std::cout << "\n";
        }
        return 0;
    }
    for (const auto & one : kvt::bit_variables(environ)) {
        std::cout << one << "\n";
    }
    for (int i = 1; i < argc; ++i) {
        std::cout << kvt::engine_name(argv[i], "0123456789abcdef") << "\n";
    }
    return 0;
}
