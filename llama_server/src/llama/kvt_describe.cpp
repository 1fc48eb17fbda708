#include "kvt_describe.h"

#include "kvt_cache.h"
#include "kvt_given.h"
#include "kvt_identity.h"
#include "kvt_objects.h"
#include "kvt_one_answer.h"
#include "kvt_refused.h"

#include "build-info.h"
#include "common.h"
#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <gnu/libc-version.h>
#include <unistd.h>

namespace kvt {

namespace {

using std::string;

// Grows when a fault is mended, ours or llama.cpp's, by which wrong rows may have been stored: nothing of before is found then, not
// even by a build that computes the same bits.
constexpr const char * faults_mended = "1";

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

string built() {
    string all;
    for (const auto & one : loaded_objects()) {
        all += one + "\n";
    }
    return engine_name(llama_build_info(), hex(hash(all)));
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

// They decide how a CPU cuts its work. Flash attention of one token cuts K and V into as many parts as there are threads, and
// adds their sums; on ARM, products of quantised weights go by two rows only where each thread has an even number of them.
string threads(const llama_cparams & cparams) {
    return std::to_string(cparams.n_threads) + ", prompts " + std::to_string(cparams.n_threads_batch);
}

// What the CPU's library says of its exact attention (llama_server/cpu); empty of stock's, which does not know the name. Said of all
// models: an operation that a GPU does not do is done by the CPU, wherever the layer is.
string cpu_attention() {
    auto * cpu = ggml_backend_reg_by_name("CPU");
    using state = const char * (*)(void);
    const auto said = cpu != nullptr ? (state) ggml_backend_reg_get_proc_address(cpu, "exactattn_state") : nullptr;
    return said != nullptr ? said() : "";
}

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

bool on_cpu(const llama_model & model) {
    for (int32_t il = 0; il < llama_model_n_layer(&model); ++il) {
        if (ggml_backend_dev_type(model.dev_layer(il)) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return true;
        }
    }
    return false;
}

// Devices that compute for the CPU's layers, where many tokens come at once; empty if there are none, or no such layer.
string offload(const common_params & params, const llama_model & model) {
    if (params.no_op_offload || !on_cpu(model)) {
        return "";
    }
    auto all = params.devices; // those named, or all; nullptr: none
    for (size_t i = 0; params.devices.empty() && i < ggml_backend_dev_count(); ++i) {
        all.push_back(ggml_backend_dev_get(i));
    }
    std::vector<string> names;
    for (auto * device : all) {
        const auto type = device != nullptr ? ggml_backend_dev_type(device) : GGML_BACKEND_DEVICE_TYPE_CPU;
        if (type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            names.emplace_back(ggml_backend_dev_description(device));
        }
    }
    std::sort(names.begin(), names.end());
    string text;
    for (const auto & one : names) {
        text += (text.empty() ? "" : ", ") + one;
    }
    return text;
}

// Rows and states of a layer depend on what computes the layers before it: of all of them, where some have no rows.
string all_devices(const llama_model & model) {
    string text, before;
    for (int32_t il = 0; il < llama_model_n_layer(&model); ++il) {
        const string name = ggml_backend_dev_description(model.dev_layer(il));
        if (name != before) {
            text += (text.empty() ? "" : ", ") + std::to_string(il) + " " + name;
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
    said.gate = gate == "restore" ? gate_mode::restore : gate == "recompute" ? gate_mode::recompute : gate_mode::measured;
    const string least = variable("OLLAMA_KV_TIER_MIN_TOKENS");
    if (!least.empty() && least.size() < 10 && least.find_first_not_of("0123456789") == string::npos) {
        said.min_tokens = (uint32_t) std::strtoul(least.c_str(), nullptr, 10);
    }
}

string variables() {
    string all;
    for (const auto & one : bit_variables(environ)) {
        all += one + "\n";
    }
    return all.empty() ? all : hex(hash(all));
}

// Options that decide which device computes with a weight, and in which order its values lie; empty if all are as usual.
string placement(const common_params & params) {
    string text;
    text += params.no_op_offload ? "no-op-offload " : "";
    text += params.no_extra_bufts ? "no-repack " : "";
    text += params.no_host ? "no-host " : "";
    if (params.split_mode != LLAMA_SPLIT_MODE_LAYER) {
        text += "split " + std::to_string((int) params.split_mode) + " on " + std::to_string(params.main_gpu) + " ";
        for (const float part : params.tensor_split) {
            text += part > 0 ? std::to_string(part) + "/" : "";
        }
    }
    return text;
}

// What else decides the rows of an image: where it is encoded, how large it may become, and how many are encoded at once.
string projector(const common_params & params) {
    string text = std::to_string(params.image_min_tokens) + "-" + std::to_string(params.image_max_tokens) + " tokens, " +
                  std::to_string(params.mtmd_batch_max_tokens) + " at once, flash attention " + std::to_string((int) params.flash_attn_type) + " on";
    for (size_t i = 0; params.mmproj_use_gpu && i < ggml_backend_dev_count(); ++i) {
        text += string(" ") + ggml_backend_dev_description(ggml_backend_dev_get(i));
    }
    return text;
}

// `window`: that many positions back, and the rows are in no block; 0: they are. A layer without V has a V of no bytes.
void add_layers(hello & said, const std::vector<plane> & planes, uint32_t window) {
    for (size_t i = 0; i < planes.size(); ++i) {
        const plane & k = planes[i];
        const plane v   = i + 1 < planes.size() && planes[i + 1].is_v ? planes[++i] : plane();
        layer one;
        one.child       = window > 0 ? 1 : 0;
        one.index       = (uint16_t) k.layer;
        one.kind        = window > 0 ? 1 : 0;
        one.window      = window;
        one.kv_heads    = k.kv_heads;
        one.k_head_dim  = k.head_dim;
        one.v_head_dim  = v.head_dim;
        one.k_row_bytes = window > 0 ? 0 : (uint32_t) k.row_bytes;
        one.v_row_bytes = window > 0 ? 0 : (uint32_t) v.row_bytes;
        said.layers.push_back(one);
    }
}

} // namespace

hello describe_server(const common_params & params, llama_context * ctx, drafts drafting, const used_files & loaded) {
    hello said;
    std::vector<plane> planes;
    said.unsupported = why_not(params, ctx, drafting, loaded, planes);
    const auto & cparams = ctx->get_cparams();
    const string model = base_name(params.model.path);
    said.fields = { { "model", model.substr(0, 128) }, { "engine", built() },
                    { "flash_attention", cparams.flash_attn ? "on" : "off" } };
    if (!said.unsupported.empty()) {
        return said;
    }
    for (const auto & one : loaded) { // what is in them decides, whatever they are called
        said.files.push_back(one.file);
    }
    if (!params.mmproj.path.empty()) {
        said.fields.emplace_back("projector", projector(params));
    }
    said.fields.emplace_back("adapters", adapters_of(params));
    said.fields.emplace_back("vectors", vectors_of(params));
    said.fields.emplace_back("overrides", overrides_of(params));
    said.fields.emplace_back("rope", (long_context(cparams) ? "long " : "short ") + rope(cparams));
    const bool transposed = std::any_of(planes.begin(), planes.end(), [](const plane & one) { return one.transposed; });
    said.fields.emplace_back("v", transposed ? "transposed" : "");
    said.fields.emplace_back("batch", batches(cparams));
    said.fields.emplace_back("devices", devices(*llama_get_model(ctx), planes));
    said.fields.emplace_back("offload", offload(params, *llama_get_model(ctx)));
    said.fields.emplace_back("cpu", processor() + " " + llama_print_system_info());
    said.fields.emplace_back("attention", cpu_attention());
    said.fields.emplace_back("threads", threads(cparams));
    said.fields.emplace_back("libc", gnu_get_libc_version());
    string placed; // other tensors than a layer's, by hand
    for (const auto & one : params.tensor_buft_overrides) {
        if (one.pattern != nullptr) {
            placed += string(one.pattern) + " " + ggml_backend_buft_name(one.buft) + ", ";
        }
    }
    said.fields.emplace_back("placed", as_value(placed));
    said.fields.emplace_back("placement", placement(params));
    said.fields.emplace_back("variables", variables());
    said.fields.emplace_back("salt", variable("OLLAMA_KV_TIER_SALT")); // the sidecar keeps its digest only
    said.k_dtype = ggml_type_name(planes[0].tensor->type);
    said.v_dtype = ggml_type_name(planes[planes.size() > 1 && planes[1].is_v ? 1 : 0].tensor->type);
    add_layers(said, planes, 0);
    string why;
    const auto parts = parts_of(ctx, why);
    said.states = parts.states;
    said.fields.emplace_back("one_answer", gives_one_answer(params, ctx, parts, planes, cpu_attention()) ? faults_mended : "");
    if (share_cells(ctx, parts)) { // attention goes over the cells of all slots, and its parts are cut otherwise
        said.fields.emplace_back("cells", "shared by " + std::to_string(cparams.n_seq_max));
    }
    if (parts.states) {
        said.fields.emplace_back("layers", all_devices(*llama_get_model(ctx)));
    }
    if (parts.window != nullptr) {
        // A checkpoint that holds rows is read only by a cache of as many streams.
        said.fields.emplace_back("streams", std::to_string(parts.rows->get_n_stream()));
        const auto window = planes_of(*parts.window, 0, parts.has_v, why);
        add_layers(said, window, llama_get_model(ctx)->hparams.n_swa);
        for (const auto & one : window) {
            said.window_row_bytes += (uint32_t) one.row_bytes;
        }
        // The server goes on only where it holds one row more than the next token sees.
        said.window_least = llama_get_model(ctx)->hparams.n_swa + 1;
        said.window_most  = parts.window->get_size();
    }
    add_settings(said);
    return said;
}

bool shifts_exactly(llama_context * ctx) {
    std::string why;
    const auto * cache = parts_of(ctx, why).rows;
    // RoPE multiplies by a factor whatever the angle, with YaRN also by one of its own; and quantised rows are rounded anew.
    const auto & cparams = ctx->get_cparams();
    return cache != nullptr && cache->type_k() == GGML_TYPE_F16 && cparams.yarn_attn_factor == 1.0f && cparams.yarn_ext_factor == 0.0f;
}

bool shift_waits(llama_context * ctx) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    return parts.rows != nullptr && (parts.rows->get_has_shift() || (parts.window != nullptr && parts.window->get_has_shift()));
}

} // namespace kvt
