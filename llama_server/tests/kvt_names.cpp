// What of this program's environment decides bits, a line each; then, for each argument, the engine's name with it as a version.
// With the argument "--objects": what code is in its memory.
#include "../src/kvt_identity.h"
#include "../src/kvt_objects.h"

#include <iostream>
#include <string>

#include <unistd.h>

int main(int argc, char ** argv) {
    if (argc > 1 && argv[1] == std::string("--objects")) {
        for (const auto & one : kvt::loaded_objects()) {
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
