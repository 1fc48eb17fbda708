// Frames over a Unix socket, each with a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kvt {

enum class transfer { done, late, broken };

// A descriptor, or -1 and why. Never waits: a sidecar whose queue of connections is full is none. Nor is one of another user,
// unless that is root.
int connect_socket(const std::string & path, std::string & why);
void close_socket(int fd); // -1 is fine

// Sends one frame and receives one. An answer that is no frame, or has more than 64 MiB, is broken.
transfer send_and_receive(int fd, uint16_t kind, const std::string & body, std::chrono::steady_clock::time_point until,
                          uint16_t & answer_kind, std::string & answer);

} // namespace kvt
