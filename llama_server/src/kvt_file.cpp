#include "kvt_file.h"

#include "kvt_crc.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kvt {

namespace {

constexpr std::string_view unfinished = ".tmp"; // docs/engine-protocol.md
constexpr uint32_t most_head_bytes = 2u << 20;

// What the sidecar checks, too: between its look and this one somebody may have been there. A negative errno: `why`.
int open_checked(const std::string & path, int flags, uint64_t bytes, std::string & why) {
    const int fd = open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        const int error = errno;
        why = path + ": " + std::strerror(error);
        return -error;
    }
    struct stat info {};
    if (fstat(fd, &info) != 0) {
        why = path + ": " + std::strerror(errno);
    } else if (!S_ISREG(info.st_mode) || (uint64_t) info.st_size != bytes) {
        why = path + ": not a file of " + std::to_string(bytes) + " bytes";
    } else if (info.st_uid != geteuid() || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        why = path + ": others may write it";
    } else {
        return fd;
    }
    close(fd);
    return -EACCES;
}

// What a file system says that cannot read past the page cache: as it opens, or as it reads.
bool cannot_direct(int error) { return error == EINVAL || error == EOPNOTSUPP; }

// As open_checked, past the page cache if that can be.
int open_direct(const file & named, bool & direct, std::string & why) {
    const int fd = open_checked(named.path, O_RDONLY | O_DIRECT, named.file_bytes, why);
    direct = fd >= 0;
    return cannot_direct(-fd) ? open_checked(named.path, O_RDONLY, named.file_bytes, why) : fd;
}

// An errno, -1 if there are not so many, or 0.
int read_bytes(int fd, uint64_t offset, char * to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, to + done, bytes - done, (off_t) (offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return got < 0 ? errno : -1;
        }
        done += (size_t) got;
    }
    return 0;
}

// By its name alone what is named may be any file of this user's. One that waits for a block has a name of its own, and just the size
// that the block has: nothing is written behind its end.
bool is_reservation(const reserved & named, const std::vector<size_t> & segments) {
    const std::string_view path = named.path;
    const std::string_view name = path.substr(path.size() - std::min(path.size(), unfinished.size()));
    uint64_t end = named.payload_offset;
    for (const size_t bytes : segments) {
        end += page_aligned(bytes);
    }
    return path.substr(0, 1) == "/" && name == unfinished && named.payload_offset >= page_bytes &&
           named.payload_offset <= most_head_bytes && named.payload_offset % page_bytes == 0 && end == named.file_bytes;
}

// Nobody has written its head yet, and it has no other name: a file that holds anything begins with something else.
bool is_new(int fd, size_t head_bytes) {
    struct stat info {};
    if (fstat(fd, &info) != 0 || info.st_nlink != 1) {
        return false;
    }
    char page[page_bytes];
    for (size_t at = 0; at < head_bytes; at += page_bytes) {
        const auto is_zero = [](char byte) { return byte == 0; };
        if (read_bytes(fd, at, page, page_bytes) != 0 || !std::all_of(page, page + page_bytes, is_zero)) {
            return false;
        }
    }
    return true;
}

} // namespace

size_t page_aligned(size_t bytes) { return (bytes + page_bytes - 1)/page_bytes*page_bytes; }

std::vector<size_t> segment_bytes(const hello & said, uint32_t rows) {
    std::vector<size_t> sizes;
    for (const auto & one : said.layers) {
        for (uint32_t row_bytes : { one.k_row_bytes, one.v_row_bytes }) {
            if (row_bytes > 0) {
                sizes.push_back((size_t) rows*row_bytes);
            }
        }
    }
    return sizes;
}

std::vector<size_t> state_segments(uint64_t bytes) {
    std::vector<size_t> sizes;
    for (; bytes > 0; bytes -= sizes.back()) {
        sizes.push_back((size_t) std::min<uint64_t>(bytes, state_part_bytes));
    }
    return sizes;
}

opened::~opened() { close(fd_); }

int open_for_reading(const file & named, std::string & why) {
    return open_checked(named.path, O_RDONLY, named.file_bytes, why);
}

int open_for_writing(const reserved & named, const std::vector<size_t> & segments, std::string & why) {
    if (!is_reservation(named, segments)) {
        why = named.path + ": no place for a block of this size";
        return -1;
    }
    const int fd = open_checked(named.path, O_RDWR, named.file_bytes, why);
    if (fd >= 0 && !is_new(fd, named.payload_offset)) {
        why = named.path + ": holds something already";
        close(fd);
        return -1;
    }
    return fd;
}

bool read_segment(int fd, uint64_t offset, void * data, size_t bytes, uint32_t crc, std::string & why) {
    if (const int error = read_bytes(fd, offset, static_cast<char *>(data), bytes); error != 0) {
        why = error > 0 ? std::strerror(error) : "the file ends too early";
        return false;
    }
    if (crc32c(data, bytes) != crc) {
        why = "the checksum does not match";
        return false;
    }
    return true;
}

void forget_pages(int fd) { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

bool read_payload(const file & named, char * to, size_t bytes, std::string & why) {
    bool direct = false;
    const int fd = open_direct(named, direct, why);
    if (fd < 0) {
        return false;
    }
    const opened closes(fd);
    int error = read_bytes(fd, named.payload_offset, to, bytes);
    if (direct && cannot_direct(error) && fcntl(fd, F_SETFL, 0) == 0) {
        direct = false;
        error = read_bytes(fd, named.payload_offset, to, bytes);
    }
    if (!direct) {
        forget_pages(fd);
    }
    if (error != 0) {
        why = error > 0 ? std::strerror(error) : "the file ends too early";
    }
    return error == 0;
}

bool write_segment(int fd, uint64_t offset, const void * data, size_t bytes, uint32_t & crc, std::string & why) {
    const char * at = static_cast<const char *>(data);
    for (size_t done = 0; done < bytes;) {
        const ssize_t put = pwrite(fd, at + done, bytes - done, (off_t) (offset + done));
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            why = put < 0 ? std::strerror(errno) : "nothing was written";
            return false;
        }
        done += (size_t) put;
    }
    crc = crc32c(data, bytes);
    return true;
}

bool write_segments(const reserved & named, const char * data, const std::vector<size_t> & segments, filled & done) {
    std::string why;
    const int fd = open_for_writing(named, segments, why);
    if (fd < 0) {
        return false;
    }
    const opened closes(fd);
    done.id = named.id;
    uint64_t offset = named.payload_offset;
    bool written = true;
    for (const size_t bytes : segments) {
        done.crcs.push_back(0);
        written = written && write_segment(fd, offset, data, bytes, done.crcs.back(), why);
        offset += page_aligned(bytes);
        data += bytes;
    }
    return written;
}

} // namespace kvt
