// Calls of the kernel's that hang, as those of a disk do: the library's threads wait in them until they may go on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hangs {

enum call { none, opens, reads, writes, closes, forgets, asks };

inline std::atomic<call> hung { none };
inline const std::thread::id main_loop = std::this_thread::get_id();

inline void in(const std::string & name) {
    const char * names[] = { "", "open", "pread", "pwrite", "close", "posix_fadvise", "statfs" };
    for (int i = 0; i < 7; ++i) {
        if (name == names[i]) {
            hung.store((call) i);
        }
    }
}

inline bool is_file(int fd) {
    struct stat info {};
    return fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

inline void wait(call in_this) {
    while (hung.load() == in_this && std::this_thread::get_id() != main_loop) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

} // namespace hangs

// In place of libc's.
extern "C" {

int open(const char * path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = (flags & O_CREAT) != 0 ? va_arg(more, int) : 0;
    va_end(more);
    if (std::strstr(path, ".kvb") != nullptr || std::strstr(path, ".tmp") != nullptr) {
        hangs::wait(hangs::opens);
    }
    return (int) syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t pread(int fd, void * data, size_t bytes, off_t offset) {
    hangs::wait(hangs::reads);
    return syscall(SYS_pread64, fd, data, bytes, offset);
}

ssize_t pwrite(int fd, const void * data, size_t bytes, off_t offset) {
    hangs::wait(hangs::writes);
    return syscall(SYS_pwrite64, fd, data, bytes, offset);
}

int close(int fd) {
    if (hangs::is_file(fd)) {
        hangs::wait(hangs::closes);
    }
    return (int) syscall(SYS_close, fd);
}

int posix_fadvise(int fd, off_t offset, off_t bytes, int advice) noexcept {
    hangs::wait(hangs::forgets);
    return (int) syscall(SYS_fadvise64, fd, offset, bytes, advice);
}

int statfs(const char * path, struct statfs * info) noexcept {
    hangs::wait(hangs::asks);
    return (int) syscall(SYS_statfs, path, info);
}

} // extern "C"
