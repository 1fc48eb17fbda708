#include "settings.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unistd.h>

namespace fakegpu {
namespace {

std::vector<std::string> words(const char *text) {
    std::vector<std::string> found;
    std::string word;
    for (const char *at = text; *at; at++) {
        if (*at != ',') {
            word += *at;
        } else {
            found.push_back(word);
            word.clear();
        }
    }
    if (!word.empty()) found.push_back(word);
    return found;
}

std::vector<long> numbers(const char *variable, const char *otherwise) {
    const char *text = std::getenv(variable);
    std::vector<long> found;
    for (const std::string &word : words(text && *text ? text : otherwise)) found.push_back(std::stol(word));
    return found;
}

Settings from_environment() {
    Settings s;
    s.vram_mib = numbers("FAKEGPU_VRAM_MB", "1024");
    s.delay_us = numbers("FAKEGPU_DELAY_US", "0");
    s.seed = static_cast<unsigned>(numbers("FAKEGPU_SEED", "1")[0]);
    s.failing_allocations = numbers("FAKEGPU_FAIL_ALLOC", "");
    s.failing_launches = numbers("FAKEGPU_FAIL_LAUNCH", "");
    s.multiprocessors = numbers("FAKEGPU_MULTIPROCESSORS", "3")[0];
    s.host_visible = numbers("FAKEGPU_HOST_VISIBLE", "0")[0] != 0;
    if (const char *visible = std::getenv("CUDA_VISIBLE_DEVICES")) s.visible = words(visible);
    return s;
}

void write(FILE *file, const char *format, va_list arguments) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    std::fprintf(file, "%d ", getpid());
    std::vfprintf(file, format, arguments);
    std::fputc('\n', file);
    std::fflush(file);
}

FILE *log_file() {
    static FILE *file = [] {
        const char *name = std::getenv("FAKEGPU_LOG");
        return name && *name ? std::fopen(name, "a") : nullptr;
    }();
    return file;
}

} // namespace

const Settings &settings() {
    static const Settings read = from_environment();
    return read;
}

void say(const char *format, ...) {
    if (!log_file()) return;
    va_list arguments;
    va_start(arguments, format);
    write(log_file(), format, arguments);
    va_end(arguments);
}

void fault(const char *format, ...) {
    const std::string said = std::string("fault: fake GPU: ") + format;
    for (FILE *file : {log_file(), stderr}) {
        if (!file) continue;
        va_list arguments;
        va_start(arguments, format);
        write(file, said.c_str(), arguments);
        va_end(arguments);
    }
    std::abort();
}

} // namespace fakegpu
