// What of this program's environment decides bits, a line each; then, for each argument, the engine's name with it as a version.
#include "../src/kvt_identity.h"

#include <iostream>

#include <unistd.h>

int main(int argc, char ** argv) {
    for (const auto & one : kvt::bit_variables(environ)) {
        std::cout << one << "\n";
    }
    for (int i = 1; i < argc; ++i) {
        std::cout << kvt::engine_name(argv[i], "0123456789abcdef") << "\n";
    }
    return 0;
}
