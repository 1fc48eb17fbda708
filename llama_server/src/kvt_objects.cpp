#include "kvt_objects.h"

#include "kvt_crc.h"
#include "kvt_linked.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>

#include <link.h>

namespace kvt {

namespace {

using std::string;
using std::string_view;

// How their names begin: the kernel's own, connections, names of hosts, compression, text, windows on a screen. Two that compute
// have a name of their own in the namespace: NVIDIA's compiler is loaded only where its cache lacks a kernel, and is of the same
// driver as libcuda; our own kernels in front of libggml-cuda are of the build.
constexpr string_view harmless[] = {
    "linux-vdso.",
    "libbrotli", "libcom_err.", "libcrypto.", "libcurl", "libgnutls.", "libgssapi", "libhogweed.", "libidn", "libk5crypto.",
    "libkeyutils.", "libkrb5", "liblber", "libldap", "libnettle.", "libnghttp", "libngtcp", "libp11-kit.", "libpsl.", "librtmp.",
    "libsasl", "libssh", "libssl.", "libtasn1.", "libunistring.",
    "libnss_", "libresolv.",
    "libbz2.", "liblz4.", "liblzma.", "libz.", "libzstd.",
    "libedit.", "libexpat.", "libicu", "libncurses", "libtinfo.", "libxml2.",
    "libX11", "libXau.", "libXdmcp.", "libXext.", "libXfixes.", "libwayland-", "libxcb", "libxshmfence.",
    "libbsd.", "libcap.", "libgcrypt.", "libgpg-error.", "libmd.", "libpciaccess.", "libpcre", "libselinux.", "libsystemd.", "libudev.",
    "libggml-cuda-tiering.", "libnvidia-ptxjitcompiler.",
};

// Where it has no name: by the bytes that nobody writes to, as they are in memory. The file may be another one by now.
string mark_of_bytes(const dl_phdr_info & object) {
    uint32_t crc = 0;
    uint64_t size = 0;
    for (int i = 0; i < object.dlpi_phnum; ++i) {
        const auto & part = object.dlpi_phdr[i];
        if (part.p_type == PT_LOAD && (part.p_flags & PF_R) != 0 && (part.p_flags & PF_W) == 0) {
            crc = crc32c(reinterpret_cast<const char *>(object.dlpi_addr + part.p_vaddr), part.p_filesz, crc);
            size += part.p_filesz;
        }
    }
    return "bytes:" + std::to_string(size) + "-" + std::to_string(crc);
}

int collect(dl_phdr_info * object, size_t, void * to) {
    const string path = object->dlpi_name != nullptr ? object->dlpi_name : "";
    const string name = path.substr(path.rfind('/') + 1);
    if (!computes_nothing(name)) {
        const string id = build_id(*object);
        static_cast<std::vector<string> *>(to)->push_back(name + "=" + (id.empty() ? mark_of_bytes(*object) : "id:" + id));
    }
    return 0;
}

} // namespace

bool computes_nothing(const string & name) {
    return std::any_of(std::begin(harmless), std::end(harmless),
                       [&name](string_view one) { return string_view(name).substr(0, one.size()) == one; });
}

std::vector<string> loaded_objects() {
    std::vector<string> found;
    dl_iterate_phdr(collect, &found);
    std::sort(found.begin(), found.end());
    return found;
}

} // namespace kvt
