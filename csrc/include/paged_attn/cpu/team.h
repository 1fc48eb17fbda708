// The threads that work on one run, as the host program provides them.
#pragma once

namespace paged_attn::cpu {

struct Team {
    int index, size;              // this thread's, 0 <= index < size
    void *self;                   // passed to the three below
    void (*barrier)(void *self);  // all `size` threads meet
    void (*restart)(void *self);  // the shared counter becomes 0; one thread calls it, a barrier follows
    int (*take)(void *self);      // the shared counter's value, which then is one more
};

} // namespace paged_attn::cpu
