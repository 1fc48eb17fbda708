// pa_cpu_*: a plan is a kernel, a pool of threads and scratch memory.
#include "src/check.h"
#include "src/kernels.h"
#include "src/pool.h"
#include "src/status.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
static long process_id() { return static_cast<long>(getpid()); }
#else
static long process_id() { return 0; }
#endif

using paged_attn::fail;

namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr std::align_val_t kScratchAlignment{4096};

struct FreeScratch {
    void operator()(void *scratch) const { ::operator delete(scratch, kScratchAlignment); }
};
using Scratch = std::unique_ptr<void, FreeScratch>;

Scratch zeroed(size_t bytes) { // touched now, so that the first run does not wait for the kernel's pages
    Scratch scratch(::operator new(bytes, kScratchAlignment, std::nothrow)); // a sanitizer ends the program otherwise
    if (!scratch) throw std::bad_alloc();
    std::memset(scratch.get(), 0, bytes);
    return scratch;
}

} // namespace

struct pa_cpu_plan {
    pa_cpu_plan(const pa_shape &its_shape, const paged_attn::Kernel &its_kernel, int32_t n_threads)
        : shape(its_shape), kernel(its_kernel), scratch_bytes(kernel.scratch_bytes(shape, n_threads)),
          scratch(zeroed(scratch_bytes)), pool(n_threads), owner(process_id()) {}

    const pa_shape shape;
    const paged_attn::Kernel &kernel;
    const size_t scratch_bytes;
    const Scratch scratch;
    paged_attn::Pool pool;
    const long owner; // the process that has the threads: a fork does not copy them
    std::atomic<bool> running{false};
};

namespace {

struct Run {
    pa_cpu_plan *plan;
    const pa_args *args;
};

void work(void *context, int index) {
    const Run &run = *static_cast<Run *>(context);
    pa_cpu_plan &plan = *run.plan;
    paged_attn::cpu::Team team;
    team.index = index;
    team.size = plan.pool.size();
    team.self = &plan.pool;
    team.barrier = [](void *self) { static_cast<paged_attn::Pool *>(self)->meet(); };
    team.restart = [](void *self) { static_cast<paged_attn::Pool *>(self)->restart(); };
    team.take = [](void *self) { return static_cast<paged_attn::Pool *>(self)->take(); };
    plan.kernel.run(plan.shape, *run.args, plan.scratch.get(), team);
}

} // namespace

pa_status pa_cpu_plan_create(const pa_shape *shape, int32_t n_threads, const char *isa, pa_cpu_plan **plan) {
    if (!plan) return fail(PA_BAD_ARGUMENT, "there is nowhere to put the plan: its address is null");
    *plan = nullptr;
    pa_status status = paged_attn::check_shape(shape);
    if (status != PA_OK) return status;
    if (n_threads < 1 || n_threads > kMaxThreads) {
        return fail(PA_BAD_ARGUMENT, "%d threads: 1 to %d are possible", n_threads, kMaxThreads);
    }
    const paged_attn::Kernel *kernel = nullptr;
    status = paged_attn::find_kernel(isa, kernel);
    if (status != PA_OK) return status;
    if (const char *why = kernel->unsupported(*shape)) return fail(PA_UNSUPPORTED, "%s", why);
    try {
        *plan = new pa_cpu_plan(*shape, *kernel, n_threads);
        return PA_OK;
    } catch (const std::bad_alloc &) {
        return fail(PA_OUT_OF_MEMORY, "no memory for a plan of %zu bytes", kernel->scratch_bytes(*shape, n_threads));
    } catch (const std::system_error &error) {
        return fail(PA_OUT_OF_MEMORY, "cannot start %d threads: %s", n_threads, error.what());
    } catch (...) {
        return fail(PA_OUT_OF_MEMORY, "the plan could not be made");
    }
}

pa_status pa_cpu_run(pa_cpu_plan *plan, const pa_args *args) {
    if (!plan) return fail(PA_BAD_ARGUMENT, "the plan is null");
    pa_status status = paged_attn::check_inputs(plan->shape, args);
    if (status == PA_OK) status = paged_attn::check_outputs(*args);
    if (status != PA_OK) return status;
    if (plan->owner != process_id()) {
        return fail(PA_BAD_ARGUMENT, "the plan was made before this process was forked; its threads are not here");
    }
    if (plan->running.exchange(true, std::memory_order_acquire)) {
        return fail(PA_BAD_ARGUMENT, "the plan is running in another thread");
    }
    Run run{plan, args};
    plan->pool.run(work, &run);
    plan->running.store(false, std::memory_order_release);
    return PA_OK;
}

const char *pa_cpu_plan_isa(const pa_cpu_plan *plan) { return plan ? plan->kernel.isa : ""; }

size_t pa_cpu_plan_bytes(const pa_cpu_plan *plan) { return plan ? plan->scratch_bytes : 0; }

void pa_cpu_plan_destroy(pa_cpu_plan *plan) {
    if (plan && plan->owner != process_id()) return; // after a fork there is nothing to end here
    delete plan;
}
