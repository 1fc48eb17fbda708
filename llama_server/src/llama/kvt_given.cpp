#include "kvt_given.h"

#include "kvt_sha256.h"

#include "common.h"
#include "llama-adapter.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace kvt {

using std::string;

namespace {

constexpr size_t longest_value = 1024;

string exactly(double value) { // every bit of it
    char text[40];
    snprintf(text, sizeof text, "%a", value);
    return text;
}

string counted(const string & text) { return std::to_string(text.size()) + ":" + text + " "; }

string digest_of(const string & text) { return hex_of(sha256_of(text.data(), text.size())); }

string value_of(const llama_model_kv_override & one) {
    switch (one.tag) {
        case LLAMA_KV_OVERRIDE_TYPE_INT:
            return std::to_string(one.val_i64);
        case LLAMA_KV_OVERRIDE_TYPE_FLOAT:
            return exactly(one.val_f64);
        case LLAMA_KV_OVERRIDE_TYPE_BOOL:
            return one.val_bool ? "true" : "false";
        case LLAMA_KV_OVERRIDE_TYPE_STR:
            return string(one.val_str, strnlen(one.val_str, sizeof one.val_str));
    }
    return "";
}

// llama.cpp puts them into such a map by address, those of scale 0 aside: so the order in which it adds three of them may be another
// one in each process.
string order_of(const common_params & params) {
    llama_adapter_loras applied;
    std::vector<llama_adapter_lora *> all;
    for (const auto & one : params.lora_adapters) {
        all.push_back(one.ptr);
        if (one.scale != 0.0f) {
            applied.insert({ one.ptr, one.scale });
        }
    }
    string text;
    for (const auto & one : applied) {
        text += " " + std::to_string(std::find(all.begin(), all.end(), one.first) - all.begin());
    }
    return applied.size() > 1 ? " added" + text : "";
}

} // namespace

used_files look_at_files(const common_params & params) {
    std::vector<std::pair<const char *, string>> paths;
    for (const auto & path : part_paths(params.model.path)) {
        paths.emplace_back("model", path);
    }
    if (!params.mmproj.path.empty()) {
        paths.emplace_back("projector", params.mmproj.path);
    }
    for (const auto & one : params.lora_adapters) {
        paths.emplace_back("adapter", one.path);
    }
    for (const auto & one : params.control_vectors) {
        paths.emplace_back("control vector", one.fname);
    }
    paths.resize(std::min(paths.size(), most_files + 1));
    used_files all;
    for (const auto & one : paths) {
        auto file = look_at(one.second);
        const bool in_model = string(one.first) == "projector" && file == all.front().file; // an image's encoder may lie in the model's own
        if (!in_model) {
            all.push_back({ one.first, std::move(file) });
        }
    }
    return all;
}

string adapters_of(const common_params & params) {
    string text;
    for (const auto & one : params.lora_adapters) {
        text += (text.empty() ? "" : ",") + exactly((double) one.scale);
    }
    return text + order_of(params);
}

bool waits_for_tokens(const common_params & params) {
    return std::any_of(params.lora_adapters.begin(), params.lora_adapters.end(), [](const auto & one) {
        return one.ptr == nullptr || llama_adapter_get_alora_n_invocation_tokens(one.ptr) > 0;
    });
}

string vectors_of(const common_params & params) {
    string text;
    for (const auto & one : params.control_vectors) {
        text += exactly((double) one.strength) + ",";
    }
    return text.empty() ? "" : text + " layers " + std::to_string(params.control_vector_layer_start) + "-" + std::to_string(params.control_vector_layer_end);
}

string overrides_of(const common_params & params) {
    string all;
    for (const auto & one : params.kv_overrides) {
        if (one.key[0] != 0) { // the last one ends the list
            all += counted(one.key) + std::to_string((int) one.tag) + " " + counted(value_of(one));
        }
    }
    return all.empty() ? "" : digest_of(all);
}

string as_value(const string & text) {
    const bool plain = std::all_of(text.begin(), text.end(), [](char byte) { return byte >= ' ' && byte <= '~'; });
    return plain && text.size() <= longest_value ? text : digest_of(text);
}

} // namespace kvt
