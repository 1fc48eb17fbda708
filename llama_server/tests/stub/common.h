// Of llama.cpp's header of this name, what kvt_slots uses.
#pragma once

#include <list>

struct common_prompt_checkpoint {};
