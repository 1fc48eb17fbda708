// Of llama.cpp's header of this name, what kvt_given uses.
#pragma once

#include <unordered_map>

struct llama_adapter_lora;
using llama_adapter_loras = std::unordered_map<llama_adapter_lora *, float>;
