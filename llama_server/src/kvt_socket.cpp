#include "kvt_socket.h"

#include "kvt_numbers.h"
#include "kvt_wire.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvt {

namespace {

constexpr size_t head_bytes = 8;
constexpr size_t step_bytes = 1u << 20; // memory grows with what has come, not with what was announced

using time_point = std::chrono::steady_clock::time_point;

// Until the descriptor is ready for `events`.
transfer ready(int fd, short events, time_point until) {
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
        if (left < 0) {
            return transfer::late;
        }
        pollfd one { fd, events, 0 };
        const int got = poll(&one, 1, (int) std::min<long long>(left + 1, 1 << 30));
        if (got > 0) {
            return transfer::done;
        }
        if (got < 0 && errno != EINTR) {
            return transfer::broken;
        }
    }
}

bool again() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

transfer send_all(int fd, const char * data, size_t bytes, time_point until) {
    while (bytes > 0) {
        const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            data += sent;
            bytes -= (size_t) sent;
            continue;
        }
        const transfer waited = again() ? ready(fd, POLLOUT, until) : transfer::broken;
        if (waited != transfer::done) {
            return waited;
        }
    }
    return transfer::done;
}

transfer receive_all(int fd, char * data, size_t bytes, time_point until) {
    while (bytes > 0) {
        const ssize_t got = recv(fd, data, bytes, MSG_DONTWAIT);
        if (got > 0) {
            data += got;
            bytes -= (size_t) got;
            continue;
        }
        const transfer waited = got < 0 && again() ? ready(fd, POLLIN, until) : transfer::broken;
        if (waited != transfer::done) {
            return waited;
        }
    }
    return transfer::done;
}

// Whoever listens reads prompts, and names files to write. The kernel says who it was that began to listen.
bool is_trusted(int fd) {
    ucred peer {};
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer && (peer.uid == geteuid() || peer.uid == 0);
}

} // namespace

int connect_socket(const std::string & path, std::string & why) {
    sockaddr_un address {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) {
        why = "the path of the sidecar's socket is too long: " + path;
        return -1;
    }
    why = "no sidecar listens on " + path;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, reinterpret_cast<const sockaddr *>(&address), sizeof address) != 0) {
        close(fd);
        return -1;
    }
    if (!is_trusted(fd)) {
        close(fd);
        why = path + " is another user's: it is sent nothing; a sidecar runs as the same user, or as root";
        return -1;
    }
    return fd;
}

void close_socket(int fd) {
    if (fd >= 0) {
        close(fd);
    }
}

transfer send_and_receive(int fd, uint16_t kind, const std::string & body, time_point until, uint16_t & answer_kind,
                          std::string & answer) {
    writer head;
    head.u32((uint32_t) body.size());
    head.u16(kind);
    head.u16(0);
    const std::string frame = head.body() + body;
    transfer result = send_all(fd, frame.data(), frame.size(), until);
    if (result == transfer::broken) {
        return result;
    }
    char received[head_bytes];
    if (result == transfer::done) {
        result = receive_all(fd, received, sizeof received, until);
    }
    if (result != transfer::done) {
        return result;
    }
    reader in(received, sizeof received);
    const uint32_t bytes = in.u32();
    answer_kind = in.u16();
    if (in.u16() != 0 || bytes > most_reply_bytes) {
        return transfer::broken;
    }
    answer.clear();
    while (answer.size() < bytes) {
        const size_t at = answer.size();
        answer.resize(std::min<size_t>(bytes, at + step_bytes));
        result = receive_all(fd, &answer[at], answer.size() - at, until);
        if (result != transfer::done) {
            return result;
        }
    }
    return transfer::done;
}

} // namespace kvt
