// A thing of a class, and of none that derives from it.
#pragma once

#include <typeinfo>

namespace kvt {

// One that derives from a class that is known here may keep more than it does, and llama.cpp has such: nullptr.
template <typename Kind, typename Any> Kind * exactly(Any * one) {
    return one != nullptr && typeid(*one) == typeid(Kind) ? static_cast<Kind *>(one) : nullptr;
}

} // namespace kvt
