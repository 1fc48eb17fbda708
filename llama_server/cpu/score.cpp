// Whether GGML takes this library, among all libggml-cpu-*.so beside llama-server: the one with the highest score computes.
//
// It is compiled without any instruction set, and uses the C library alone: it runs on any processor, and its functions must not be
// those of the other files, which are compiled for one. EXACTATTN_FLAGS: all that Linux said of the processor that they are for.
#include "ggml-backend-impl.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int taken = 1 << 20; // stock's are below 1 << 13
constexpr int left  = 0;

// As Ollama reads its own variables: spaces and quotes around the value do not count.
bool is_asked_for() {
    const char * value = std::getenv("OLLAMA_CPU_ATTENTION");
    if (value == nullptr) {
        return false;
    }
    const char * around = " \t\r\n\"'";
    value += std::strspn(value, around);
    const char wanted[] = "exact";
    return std::strncmp(value, wanted, sizeof wanted - 1) == 0 &&
           value[sizeof wanted - 1 + std::strspn(value + sizeof wanted - 1, around)] == '\0';
}

bool has_word(const char * line, const char * word, size_t length) {
    for (const char * at = line; (at = std::strstr(at, word)) != nullptr; ++at) {
        if (std::isspace((unsigned char) at[-1]) && (at[length] == '\0' || std::isspace((unsigned char) at[length]))) {
            return true;
        }
    }
    return false;
}

// `line` begins with "flags".
bool has_all(const char * line, const char * wanted) {
    char word[64];
    while (*wanted != '\0') {
        const size_t length = std::strcspn(wanted, " ");
        if (length >= sizeof word) {
            return false;
        }
        std::memcpy(word, wanted, length);
        word[length] = '\0';
        if (length > 0 && !has_word(line, word, length)) {
            return false;
        }
        wanted += length + (wanted[length] == ' ' ? 1 : 0);
    }
    return true;
}

bool is_for_this_processor() {
    FILE * info = std::fopen("/proc/cpuinfo", "re");
    if (info == nullptr) {
        return false;
    }
    char * line  = nullptr;
    size_t room  = 0;
    bool   found = false;
    while (!found && getline(&line, &room, info) > 0) {
        found = std::strncmp(line, "flags", 5) == 0;
    }
    const bool all = found && has_all(line, EXACTATTN_FLAGS);
    std::free(line);
    std::fclose(info);
    return all;
}

int exactattn_score() { return is_asked_for() && is_for_this_processor() ? taken : left; }

} // namespace

GGML_BACKEND_DL_SCORE_IMPL(exactattn_score)
