#include "kvt_linked.h"

#include "kvt_crc.h"

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include <elf.h>
#include <fcntl.h>
#include <unistd.h>

namespace kvt {

namespace {

using std::string;

string hex(const string & bytes) {
    string text;
    for (const char byte : bytes) {
        char two[3];
        snprintf(two, sizeof two, "%02x", (unsigned) (unsigned char) byte);
        text += two;
    }
    return text;
}

// By its bytes: a copy of a file, or a link to it, is the same. Empty if it cannot be read.
string file_mark(const string & path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return "";
    }
    std::vector<char> part(1 << 20);
    uint64_t size = 0;
    uint32_t crc = 0;
    ssize_t got = 0;
    while ((got = read(fd, part.data(), part.size())) > 0) {
        crc = crc32c(part.data(), (size_t) got, crc);
        size += (uint64_t) got;
    }
    close(fd);
    char text[48];
    snprintf(text, sizeof text, "file:%" PRIu64 "-%08" PRIx32, size, crc);
    return got < 0 ? "" : text;
}

struct search {
    const linked * libraries;
    size_t count;
    string other; // a file that is another
};

int compare(dl_phdr_info * object, size_t, void * to) {
    auto & wanted = *static_cast<search *>(to);
    const string path = object->dlpi_name != nullptr ? object->dlpi_name : "";
    const string file = path.substr(path.rfind('/') + 1);
    const string name = file.substr(0, file.find(".so"));
    for (size_t i = 0; i < wanted.count; ++i) {
        if (name != wanted.libraries[i].name) {
            continue;
        }
        const string id = build_id(*object);
        if ((id.empty() ? file_mark(path) : "id:" + hex(id)) != wanted.libraries[i].mark) {
            wanted.other = path;
            return 1; // the last one that is looked at
        }
    }
    return 0;
}

// A router starts this program for each model by its file, and so goes past the guard that has its name in a tree
// (patchset/llama_server/guard.py). The guard starts the installed llama-server where Ollama was updated. Comes back if there
// is no guard, or if it has started this process.
void ask_guard() {
    constexpr char asked[] = "OLLAMA_KV_TIER_GUARD_ASKED";
    constexpr char copy[]  = "-installed";
    char path[PATH_MAX];
    const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
    string guard(path, (size_t) (size > 0 ? size : 0));
    const size_t name = guard.size() - std::min(guard.size(), sizeof copy - 1);
    if (std::getenv(asked) != nullptr || guard.substr(name) != copy) {
        return;
    }
    guard.resize(name);
    std::vector<string> words;
    std::ifstream all("/proc/self/cmdline");
    for (string word; std::getline(all, word, '\0');) {
        words.push_back(word);
    }
    std::vector<char *> arguments;
    for (auto & word : words) {
        arguments.push_back(&word[0]);
    }
    arguments.push_back(nullptr);
    setenv(asked, "1", 1);
    execv(guard.c_str(), arguments.data());
}

} // namespace

string build_id(const dl_phdr_info & object) {
    for (int i = 0; i < object.dlpi_phnum; ++i) {
        const auto & part = object.dlpi_phdr[i];
        if (part.p_type != PT_NOTE) {
            continue;
        }
        const char * at = reinterpret_cast<const char *>(object.dlpi_addr + part.p_vaddr);
        size_t left = part.p_memsz;
        ElfW(Nhdr) note;
        while (left >= sizeof note) {
            std::memcpy(&note, at, sizeof note);
            const size_t name = sizeof note;
            const size_t bytes = name + ((size_t) note.n_namesz + 3)/4*4;
            if (bytes + note.n_descsz > left) {
                break;
            }
            if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(at + name, "GNU", 4) == 0) {
                return string(at + bytes, note.n_descsz);
            }
            const size_t end = bytes + ((size_t) note.n_descsz + 3)/4*4;
            const size_t step = end < left ? end : left; // the last one need not be padded
            at += step;
            left -= step;
        }
    }
    return "";
}

void require_linked(const linked * libraries, size_t count) {
    search wanted { libraries, count, "" };
    dl_iterate_phdr(compare, &wanted);
    if (!wanted.other.empty()) {
        ask_guard();
        // Ollama shows its client what comes behind "error:".
        fprintf(stderr, "error: %s is not the library that this llama-server was linked to: Ollama was updated; end "
                        "`tiering up`, run `tiering patch`, then `tiering up` again\n", wanted.other.c_str());
        _exit(1); // nothing has begun that would have to end in order
    }
}

} // namespace kvt
