// Threads of a block as fibers: each with a stack of its own, switched by hand, all on one host thread.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>
#include <ucontext.h>

namespace paged_attn::gpu::emulate {

// Runs `body` on its own stack until it yields or ends. Not movable: the stack holds pointers to it.
class Fiber {
public:
    explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new char[kStackBytes]) {
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack_.get();
        context_.uc_stack.ss_size = kStackBytes;
        context_.uc_link = nullptr;
        const auto self = reinterpret_cast<size_t>(this);
        makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
                    static_cast<unsigned>(self));
    }
    Fiber(const Fiber &) = delete;

    bool done() const { return done_; }

    void resume() { // from outside; returns at the next yield or at the end
        if (_setjmp(outside_) != 0) return;
        if (started_) _longjmp(inside_, 1);
        started_ = true;
        setcontext(&context_);
    }
    void yield() { // from inside
        if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
    }

private:
    static constexpr size_t kStackBytes = 96 * 1024;
    static void enter(unsigned high, unsigned low) {
        auto *self = reinterpret_cast<Fiber *>(static_cast<size_t>(high) << 32 | low);
        self->body_();
        self->done_ = true;
        _longjmp(self->outside_, 1);
    }
    std::function<void()> body_;
    std::unique_ptr<char[]> stack_;
    ucontext_t context_;
    jmp_buf inside_, outside_;
    bool started_ = false, done_ = false;
};

} // namespace paged_attn::gpu::emulate
