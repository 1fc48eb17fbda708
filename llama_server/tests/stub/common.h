// Of llama.cpp's header of this name, what kvt_slots and kvt_given use.
#pragma once

#include "llama.h"

#include <cstdint>
#include <list>
#include <string>
#include <vector>

struct common_prompt_checkpoint {};

struct common_adapter_lora_info {
    std::string path;
    float scale;
    llama_adapter_lora * ptr;
};

struct common_control_vector_load_info {
    float strength;
    std::string fname;
};

struct common_params_model {
    std::string path;
};

struct common_params {
    common_params_model model;
    common_params_model mmproj;
    std::vector<common_adapter_lora_info> lora_adapters;
    std::vector<common_control_vector_load_info> control_vectors;
    int32_t control_vector_layer_start = -1;
    int32_t control_vector_layer_end = -1;
    std::vector<llama_model_kv_override> kv_overrides;
};
