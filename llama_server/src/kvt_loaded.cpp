#include "kvt_loaded.h"

#include <sys/stat.h>

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

} // namespace kvt
