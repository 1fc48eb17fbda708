#include "kvt_describe.h"

#include "kvt_cache.h"

#include "build-info.h"
#include "common.h"
#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <elf.h>
#include <gnu/libc-version.h>
#include <link.h>
#include <sys/stat.h>

namespace kvt {

namespace {

using std::string;

string base_name(const string & path) { return path.substr(path.rfind('/') + 1); }

bool begins(const string & text, const char * with) { return text.rfind(with, 0) == 0; }

string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    return text;
}

// FNV-1a: tells builds apart; nobody is kept from making two alike.
uint64_t hash(const string & text) {
    uint64_t value = 0xcbf29ce484222325;
    for (const char byte : text) {
        value = (value ^ (uint8_t) byte)*0x100000001b3;
    }
    return value;
}

// Size and time of a file, for one without a name by its content.
string file_mark(const string & path) {
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) {
        return "";
    }
    return std::to_string(info.st_size) + "-" + std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec);
}

bool named_by_digest(const string & name) {
    return begins(name, "sha256-") && name.size() == 71 && name.find_first_not_of("0123456789abcdef", 7) == string::npos;
}

// The linker's name of what an object was built from (NT_GNU_BUILD_ID).
string build_id(const dl_phdr_info & object) {
    for (int i = 0; i < object.dlpi_phnum; ++i) {
        const auto & part = object.dlpi_phdr[i];
        if (part.p_type != PT_NOTE) {
            continue;
        }
        const char * at  = reinterpret_cast<const char *>(object.dlpi_addr + part.p_vaddr);
        const char * end = at + part.p_memsz;
        while (at + sizeof(ElfW(Nhdr)) <= end) {
            ElfW(Nhdr) note;
            std::memcpy(&note, at, sizeof note);
            const char * name = at + sizeof note;
            const char * bytes = name + (note.n_namesz + 3)/4*4;
            if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
                return string(bytes, note.n_descsz);
            }
            at = bytes + (note.n_descsz + 3)/4*4;
        }
    }
    return "";
}

// Of the program and the libraries that compute: GGML with its backends, llama.cpp, and what they compute with.
int collect(dl_phdr_info * object, size_t, void * to) {
    const string path = object->dlpi_name != nullptr ? object->dlpi_name : "";
    const string name = base_name(path);
    bool computes = path.empty();
    for (const char * with : { "libggml", "libllama", "libm.", "libmvec", "libgomp", "libomp", "libcu", "libnv", "libhip", "libroc", "librocblas",
                               "libvulkan", "libsycl", "libOpenCL", "libze_", "libmusa" }) {
        computes = computes || begins(name, with);
    }
    if (computes) {
        string id = build_id(*object);
        if (id.empty()) {
            id = file_mark(path.empty() ? "/proc/self/exe" : path);
        }
        static_cast<std::vector<string> *>(to)->push_back(name + "=" + id);
    }
    return 0;
}

string engine_name() {
    std::vector<string> objects;
    dl_iterate_phdr(collect, &objects);
    string all;
    for (const auto & one : objects) { // in the order in which they were loaded: it is the same in every start
        all += one + "\n";
    }
    return string("llama-server/") + llama_build_info() + "+" + hex(hash(all));
}

string processor() {
    std::ifstream info("/proc/cpuinfo");
    string line;
    while (std::getline(info, line)) {
        if (begins(line, "model name")) {
            return line.substr(line.find(':') + 2);
        }
    }
    return "unknown";
}

string rope(const llama_cparams & cparams) {
    char text[256];
    snprintf(text, sizeof text, "base %a scale %a yarn %u %a %a %a %a", (double) cparams.rope_freq_base, (double) cparams.rope_freq_scale,
             cparams.n_ctx_orig_yarn, (double) cparams.yarn_ext_factor, (double) cparams.yarn_attn_factor,
             (double) cparams.yarn_beta_fast, (double) cparams.yarn_beta_slow);
    return text;
}

// How a prompt is cut decides which product of matrices computes it. n_batch cuts only where it is no multiple of n_ubatch.
string batches(const llama_cparams & cparams) {
    const string all = cparams.n_batch % cparams.n_ubatch != 0 ? " of " + std::to_string(cparams.n_batch) : "";
    return std::to_string(cparams.n_ubatch) + all;
}

// Which of two tables of factors is used follows from the size of the context (LongRoPE).
bool long_context(const llama_cparams & cparams) { return cparams.n_ctx_seq > cparams.n_ctx_orig_yarn; }

string devices(const llama_model & model, const std::vector<plane> & planes) {
    string text, before;
    for (const auto & one : planes) {
        if (one.is_v) {
            continue;
        }
        auto * device = model.dev_layer(one.layer);
        string name = ggml_backend_dev_name(device);
        name += string(" ") + ggml_backend_dev_description(device) + " " + ggml_backend_buffer_name(one.tensor->buffer);
        if (name != before) {
            text += (text.empty() ? "" : ", ") + std::to_string(one.layer) + " " + name;
        }
        before = name;
    }
    return text;
}

string variable(const char * name) {
    const char * value = std::getenv(name);
    return value != nullptr ? value : "";
}

// What the patched Ollama reads, too. A value that is none is as if it were not set.
void add_settings(hello & said) {
    const string gate = variable("OLLAMA_KV_TIER_GATE");
    said.gate = gate == "restore" ? 1 : gate == "recompute" ? 2 : 0;
    const string least = variable("OLLAMA_KV_TIER_MIN_TOKENS");
    if (!least.empty() && least.size() < 10 && least.find_first_not_of("0123456789") == string::npos) {
        said.min_tokens = (uint32_t) std::strtoul(least.c_str(), nullptr, 10);
    }
}

string why_not(const common_params & params, llama_context * ctx, bool speculative, std::vector<plane> & planes) {
    string why;
    const auto * cache = plain_cache(ctx, why);
    if (cache == nullptr) {
        return why;
    }
    const auto & cparams = ctx->get_cparams();
    const auto & hparams = llama_get_model(ctx)->hparams;
    if (!variable("OLLAMA_KV_TIER_SALT").empty()) {
        return "a salt (OLLAMA_KV_TIER_SALT), which llama-server cannot use yet";
    }
    if (speculative) {
        return "speculative decoding";
    }
    if (params.embedding || !cparams.causal_attn ||
        (cparams.pooling_type != LLAMA_POOLING_TYPE_NONE && cparams.pooling_type != LLAMA_POOLING_TYPE_UNSPECIFIED)) {
        return "embedding model";
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
        return "sliding windows in a cache that is not known here";
    }
    if (!params.lora_adapters.empty()) {
        return "LoRA adapters";
    }
    if (!params.control_vectors.empty()) {
        return "control vectors";
    }
    if (!params.kv_overrides.empty()) {
        return "overridden values of the model's file";
    }
    const string model = base_name(params.model.path);
    if (!named_by_digest(model) && model.find("-of-") != string::npos) {
        return "a model of several files";
    }
    if (cache->get_n_stream() == 1 && cparams.n_seq_max > 1) {
        return "slots that share cells (-kvu)";
    }
    planes = planes_of(ctx, 0, why);
    for (const auto & one : planes) {
        if (one.transposed && !ggml_backend_buffer_is_host(one.tensor->buffer)) {
            return "V is transposed on the device (flash attention avoids that)";
        }
    }
    return planes.empty() && why.empty() ? "layers that are not understood" : why;
}

void add_layers(hello & said, const std::vector<plane> & planes) {
    for (size_t i = 0; i + 1 < planes.size(); i += 2) {
        const auto & k = planes[i];
        const auto & v = planes[i + 1];
        layer one;
        one.index       = (uint16_t) k.layer;
        one.kv_heads    = k.kv_heads;
        one.k_head_dim  = k.head_dim;
        one.v_head_dim  = v.head_dim;
        one.k_row_bytes = (uint32_t) k.row_bytes;
        one.v_row_bytes = (uint32_t) v.row_bytes;
        said.layers.push_back(one);
    }
}

} // namespace

hello describe_server(const common_params & params, llama_context * ctx, bool speculative) {
    hello said;
    std::vector<plane> planes;
    said.unsupported = why_not(params, ctx, speculative, planes);
    const auto & cparams = ctx->get_cparams();
    const string model = base_name(params.model.path);
    said.fields = { { "model", model.substr(0, 128) }, { "engine", engine_name().substr(0, 128) },
                    { "flash_attention", cparams.flash_attn ? "on" : "off" } };
    if (!said.unsupported.empty()) {
        return said;
    }
    if (!named_by_digest(model)) {
        said.fields.emplace_back("file", file_mark(params.model.path));
    }
    said.fields.emplace_back("rope", (long_context(cparams) ? "long " : "short ") + rope(cparams));
    said.fields.emplace_back("v", planes[1].transposed ? "transposed" : "");
    said.fields.emplace_back("batch", batches(cparams));
    said.fields.emplace_back("devices", devices(*llama_get_model(ctx), planes));
    said.fields.emplace_back("cpu", processor() + " " + llama_print_system_info());
    said.fields.emplace_back("libc", gnu_get_libc_version());
    string placed; // other tensors than a layer's, by hand
    for (const auto & one : params.tensor_buft_overrides) {
        if (one.pattern != nullptr) {
            placed += string(one.pattern) + " " + ggml_backend_buft_name(one.buft) + ", ";
        }
    }
    said.fields.emplace_back("placed", placed);
    // Rows of a quantised cache are rotated unless this says no.
    said.fields.emplace_back("rotated", variable("LLAMA_ATTN_ROT_DISABLE"));
    said.k_dtype = ggml_type_name(planes[0].tensor->type);
    said.v_dtype = ggml_type_name(planes[1].tensor->type);
    add_layers(said, planes);
    add_settings(said);
    return said;
}

bool shifts_exactly(llama_context * ctx) {
    std::string why;
    const auto * cache = plain_cache(ctx, why);
    // RoPE multiplies by this factor whatever the angle, and quantised rows are rounded anew.
    return cache != nullptr && cache->type_k() == GGML_TYPE_F16 && ctx->get_cparams().yarn_attn_factor == 1.0f;
}

bool shift_waits(llama_context * ctx) {
    std::string why;
    const auto * cache = plain_cache(ctx, why);
    return cache != nullptr && cache->get_has_shift();
}

} // namespace kvt
