// What is said of files and of what changes the values in them.
//   kvt_given --parts PATH               the files of the model that is loaded from PATH
//   kvt_given --changed PATH             looks at them, and again when a line came: why nobody knows what was loaded
//   kvt_given --files MODEL PROJECTOR    how many files they are, with an adapter and a control vector each of the same names
//   kvt_given --scales SCALE…            of adapters with these scales
//   kvt_given --vectors FIRST LAST STRENGTH…
//   kvt_given --overrides KEY TYPE VALUE…   as often as there are values
//   kvt_given --value TEXT               as the value of a field
#include "../src/llama/kvt_given.h"

#include "common.h"

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

struct llama_adapter_lora {
    uint64_t waits = 0;
};

uint64_t llama_adapter_get_alora_n_invocation_tokens(const llama_adapter_lora * adapter) { return adapter->waits; }

namespace {

llama_model_kv_override override_of(const std::string & key, const std::string & type, const std::string & value) {
    llama_model_kv_override one {};
    snprintf(one.key, sizeof one.key, "%s", key.c_str());
    if (type == "int") {
        one.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
        one.val_i64 = std::stoll(value);
    } else if (type == "float") {
        one.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        one.val_f64 = std::stod(value);
    } else if (type == "bool") {
        one.tag = LLAMA_KV_OVERRIDE_TYPE_BOOL;
        one.val_bool = value == "true";
    } else {
        one.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        snprintf(one.val_str, sizeof one.val_str, "%s", value.c_str());
    }
    return one;
}

void say_all(const std::vector<std::string> & words) {
    const std::string what = words.at(0);
    common_params params;
    params.model.path = words.at(1);
    std::vector<llama_adapter_lora> adapters(words.size());
    if (what == "--parts") {
        for (const auto & path : kvt::part_paths(words[1])) {
            std::cout << path << "\n";
        }
    } else if (what == "--changed") {
        const auto before = kvt::look_at_files(params);
        std::cout << before.size() << std::endl;
        std::string line;
        std::getline(std::cin, line);
        std::cout << kvt::why_changed(before, kvt::look_at_files(params)) << "\n";
    } else if (what == "--files") {
        params.mmproj.path = words.at(2);
        params.lora_adapters.push_back({ words[2], 1, nullptr });
        params.control_vectors.push_back({ 1, words[2] });
        for (const auto & one : kvt::look_at_files(params)) {
            std::cout << one.what << " " << one.file.path << "\n";
        }
    } else if (what == "--scales") {
        for (size_t i = 1; i < words.size(); ++i) {
            params.lora_adapters.push_back({ "", std::stof(words[i]), &adapters[i] });
        }
        std::cout << kvt::adapters_of(params) << "\n" << (kvt::waits_for_tokens(params) ? "waits" : "at once") << "\n";
        adapters.back().waits = 1;
        std::cout << (kvt::waits_for_tokens(params) ? "waits" : "at once") << "\n";
    } else if (what == "--vectors") {
        params.control_vector_layer_start = std::stoi(words[1]);
        params.control_vector_layer_end = std::stoi(words.at(2));
        for (size_t i = 3; i < words.size(); ++i) {
            params.control_vectors.push_back({ std::stof(words[i]), "" });
        }
        std::cout << kvt::vectors_of(params) << "\n";
    } else if (what == "--overrides") {
        for (size_t i = 1; i + 2 < words.size(); i += 3) {
            params.kv_overrides.push_back(override_of(words[i], words[i + 1], words[i + 2]));
        }
        params.kv_overrides.emplace_back(); // ends the list
        std::cout << kvt::overrides_of(params) << "\n";
    } else {
        std::cout << kvt::as_value(words[1]) << "\n";
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        return 1;
    }
    say_all({ argv + 1, argv + argc });
    return 0;
}
