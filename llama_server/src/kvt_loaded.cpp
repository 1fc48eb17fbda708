#include "kvt_loaded.h"

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>

namespace kvt {

loaded_file look_at(const std::string & path) {
    loaded_file found;
    struct stat info {};
    const std::unique_ptr<char, decltype(&free)> absolute(realpath(path.c_str(), nullptr), &free);
    if (absolute == nullptr || stat(absolute.get(), &info) != 0) {
        return found;
    }
    const auto ns = [](const timespec & time) { return (int64_t) time.tv_sec*1000000000 + time.tv_nsec; };
    found.path     = absolute.get();
    found.device   = info.st_dev;
    found.inode    = info.st_ino;
    found.size     = (uint64_t) info.st_size;
    found.mtime_ns = ns(info.st_mtim);
    found.ctime_ns = ns(info.st_ctim);
    return found;
}

std::vector<std::string> part_paths(const std::string & path) {
    const std::string first = "-00001-of-";
    const std::string last = ".gguf";
    const size_t digits = 5;
    const size_t tail = first.size() + digits + last.size();
    const size_t begin = path.size() > tail ? path.size() - tail : std::string::npos;
    if (begin == std::string::npos || path.compare(begin, first.size(), first) != 0 || path.compare(path.size() - last.size(), last.size(), last) != 0) {
        return { path };
    }
    const std::string count = path.substr(begin + first.size(), digits);
    if (count.find_first_not_of("0123456789") != std::string::npos) {
        return { path };
    }
    std::vector<std::string> all { path };
    for (unsigned long number = 2; number <= std::stoul(count); ++number) {
        char middle[16];
        snprintf(middle, sizeof middle, "-%05lu-of-", number);
        all.push_back(path.substr(0, begin) + middle + count + last);
    }
    return all;
}

std::string why_changed(const used_files & before, const used_files & now) {
    for (size_t i = 0; i < now.size(); ++i) {
        if (i >= before.size() || before[i].file.path.empty() || !(before[i].file == now[i].file)) {
            return "the " + now[i].what + "'s file is another one than when it was loaded";
        }
    }
    return before.size() == now.size() ? "" : "other files than when the model was loaded";
}

} // namespace kvt
