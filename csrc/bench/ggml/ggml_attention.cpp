// One layer's attention by ggml, in the graphs that Ollama builds, timed: with FLASH_ATTN_EXT and without.
//
//     ggml-attention FILE name=value ...
//
// FILE holds, one after the other without gaps,
//     q    f32 [queries][heads][d_k]
//     k    k_type rows [cells][kv_heads][d_k], position = index
//     v    v_type rows [cells][kv_heads][d_v]
//     out  f32 [queries][heads][d_v]           written
// The queries are the last `queries` of the `cells` positions and see what is not after them. They are run in batches of
// `batch`; a batch sees the cells up to its own end, rounded up to 256 as Ollama's cache rounds them. Printed: one line
// per repetition, the seconds spent in ggml_backend_graph_compute. The last batch runs once before, unmeasured.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int64_t kCachePadding = 256; // kvcache.Causal rounds the cells it shows to this

[[noreturn]] void fail(const std::string &why) {
    std::fprintf(stderr, "ggml-attention: %s\n", why.c_str());
    std::exit(2);
}

// name=value pairs of the command line; every one must be used.
class Options {
  public:
    Options(int argc, char **argv) {
        for (int i = 2; i < argc; i++) {
            const std::string text = argv[i];
            const size_t equals = text.find('=');
            if (equals == std::string::npos) fail(text + " is not name=value");
            values_[text.substr(0, equals)] = text.substr(equals + 1);
        }
    }

    std::string text(const std::string &name) const {
        const auto found = values_.find(name);
        if (found == values_.end()) fail(name + " is missing");
        return found->second;
    }

    int64_t count(const std::string &name) const {
        const int64_t value = std::atoll(text(name).c_str());
        if (value <= 0) fail(name + " must be at least 1");
        return value;
    }

  private:
    std::map<std::string, std::string> values_;
};

ggml_type type_named(const std::string &name) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0})
        if (name == ggml_type_name(type)) return type;
    fail("no type " + name);
}

struct Job {
    int64_t heads, kv_heads, d_k, d_v, cells, queries, batch, repeats;
    int threads;
    ggml_type k_type, v_type;
    bool flash;
    float scale;

    explicit Job(const Options &o)
        : heads(o.count("heads")), kv_heads(o.count("kv_heads")), d_k(o.count("d_k")), d_v(o.count("d_v")),
          cells(o.count("cells")), queries(o.count("queries")), batch(o.count("batch")), repeats(o.count("repeats")),
          threads(int(o.count("threads"))), k_type(type_named(o.text("k_type"))), v_type(type_named(o.text("v_type"))),
          flash(o.text("flash") == "1"), scale(1.0f / std::sqrt(float(d_k))) {
        if (queries > cells) fail("more queries than cells");
        if (!flash && ggml_is_quantized(v_type)) fail("without flash attention V cannot be quantised");
    }

    int64_t padded_cells() const { return GGML_PAD(cells, kCachePadding); }
    size_t q_bytes() const { return size_t(queries * heads * d_k) * sizeof(float); }
    size_t k_bytes() const { return size_t(cells * kv_heads) * ggml_row_size(k_type, d_k); }
    size_t v_bytes() const { return size_t(cells * kv_heads) * ggml_row_size(v_type, d_v); }
    size_t out_bytes() const { return size_t(queries * heads * d_v) * sizeof(float); }
    size_t file_bytes() const { return q_bytes() + k_bytes() + v_bytes() + out_bytes(); }
};

char *map_file(const char *path, size_t bytes) {
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) fail(std::string("cannot open ") + path);
    if (lseek(fd, 0, SEEK_END) != off_t(bytes)) fail("the file's size does not fit the shape");
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) fail("cannot map the file");
    return static_cast<char *>(at);
}

// V as Ollama keeps it without flash attention: [kv_heads][d_v][cells].
void transpose(const char *rows, char *columns, const Job &job, size_t value_bytes) {
    const size_t width = size_t(job.kv_heads * job.d_v), cells = size_t(job.padded_cells());
    for (size_t cell = 0; cell < size_t(job.cells); cell++)
        for (size_t i = 0; i < width; i++)
            std::memcpy(columns + (i * cells + cell) * value_bytes, rows + (cell * width + i) * value_bytes, value_bytes);
}

// K and V in memory of ggml's own, on large pages where the system has them, as in the runs it is compared with.
struct Cache {
    ggml_context *ctx;
    ggml_backend_buffer_t buffer;
    ggml_tensor *k, *v;

    Cache(const Job &job, ggml_backend_t backend, const char *k_rows, const char *v_rows) {
        ctx = ggml_init({4 * ggml_tensor_overhead(), nullptr, true});
        const int64_t cells = job.padded_cells();
        k = ggml_new_tensor_3d(ctx, job.k_type, job.d_k, job.kv_heads, cells);
        v = job.flash ? ggml_new_tensor_3d(ctx, job.v_type, job.d_v, job.kv_heads, cells)
                      : ggml_new_tensor_3d(ctx, job.v_type, cells, job.d_v, job.kv_heads);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (buffer == nullptr) fail("no memory for K and V");
        advise_large_pages(ggml_backend_buffer_get_base(buffer), ggml_backend_buffer_get_size(buffer));
        ggml_backend_buffer_clear(buffer, 0);
        std::memcpy(k->data, k_rows, job.k_bytes());
        if (job.flash)
            std::memcpy(v->data, v_rows, job.v_bytes());
        else
            transpose(v_rows, static_cast<char *>(v->data), job, ggml_type_size(job.v_type));
    }

    ~Cache() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;

  private:
    static void advise_large_pages(void *base, size_t bytes) {
#ifdef MADV_HUGEPAGE
        const uintptr_t page = 4096, start = (reinterpret_cast<uintptr_t>(base) + page - 1) / page * page;
        const uintptr_t end = (reinterpret_cast<uintptr_t>(base) + bytes) / page * page;
        if (start < end) madvise(reinterpret_cast<void *>(start), end - start, MADV_HUGEPAGE);
#else
        (void)base, (void)bytes;
#endif
    }
};

// Queries [first, first + count) and the graph over what they see; the buffers are the allocator's.
class Batch {
  public:
    Batch(const Job &job, const Cache &cache, ggml_gallocr_t allocator, const char *q_rows, int64_t first, int64_t count)
        : job_(job), first_(first), count_(count) {
        last_position_ = job.cells - job.queries + first + count - 1;
        seen_ = std::min(GGML_PAD(last_position_ + 1, kCachePadding), job.padded_cells());
        ctx_ = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
        q_ = ggml_new_tensor_3d(ctx_, GGML_TYPE_F32, job.d_k, job.heads, count);
        mask_ = ggml_new_tensor_2d(ctx_, job.flash ? GGML_TYPE_F16 : GGML_TYPE_F32, seen_, count);
        ggml_set_input(q_);
        ggml_set_input(mask_);
        out_ = job.flash ? with_flash(cache) : without_flash(cache);
        ggml_set_output(out_);
        graph_ = ggml_new_graph(ctx_);
        ggml_build_forward_expand(graph_, out_);
        if (!ggml_gallocr_alloc_graph(allocator, graph_)) fail("no memory for the graph");
        std::memcpy(q_->data, q_rows + size_t(first * job.heads * job.d_k) * sizeof(float), ggml_nbytes(q_));
        fill_mask();
    }

    ~Batch() { ggml_free(ctx_); }
    Batch(const Batch &) = delete;
    Batch &operator=(const Batch &) = delete;

    double run(ggml_backend_t backend) {
        const auto start = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend, graph_) != GGML_STATUS_SUCCESS) fail("ggml_backend_graph_compute failed");
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    void store(char *out) const {
        std::memcpy(out + size_t(first_ * job_.heads * job_.d_v) * sizeof(float), out_->data, ggml_nbytes(out_));
    }

  private:
    // ml/backend/ggml/ggml.go ScaledDotProductAttention, v0.16.3; K and V as kvcache.Causal.Get shows them.
    ggml_tensor *with_flash(const Cache &cache) {
        ggml_tensor *q = ggml_permute(ctx_, q_, 0, 2, 1, 3);
        ggml_tensor *k = ggml_permute(ctx_, rows_seen(cache.k, job_.d_k), 0, 2, 1, 3);
        ggml_tensor *v = ggml_permute(ctx_, rows_seen(cache.v, job_.d_v), 0, 2, 1, 3);
        ggml_tensor *out = ggml_flash_attn_ext(ctx_, q, k, v, mask_, job_.scale, 0, 0);
        ggml_flash_attn_ext_set_prec(out, GGML_PREC_F32);
        return out;
    }

    ggml_tensor *without_flash(const Cache &cache) {
        ggml_tensor *q = ggml_permute(ctx_, q_, 0, 2, 1, 3);
        ggml_tensor *k = ggml_permute(ctx_, rows_seen(cache.k, job_.d_k), 0, 2, 1, 3);
        ggml_tensor *kq = ggml_mul_mat(ctx_, k, q);
        ggml_mul_mat_set_prec(kq, GGML_PREC_F32);
        kq = ggml_soft_max_ext(ctx_, kq, mask_, job_.scale, 0);
        ggml_tensor *v =
            ggml_view_3d(ctx_, cache.v, seen_, job_.d_v, job_.kv_heads, cache.v->nb[1], cache.v->nb[2], 0);
        ggml_tensor *out = ggml_mul_mat(ctx_, v, kq);
        return ggml_cont(ctx_, ggml_permute(ctx_, out, 0, 2, 1, 3));
    }

    ggml_tensor *rows_seen(ggml_tensor *rows, int64_t d) {
        return ggml_view_3d(ctx_, rows, d, job_.kv_heads, seen_, rows->nb[1], rows->nb[2], 0);
    }

    void fill_mask() {
        for (int64_t i = 0; i < count_; i++) {
            const int64_t visible = last_position_ - (count_ - 1 - i) + 1;
            for (int64_t cell = 0; cell < seen_; cell++) {
                const float bias = cell < visible ? 0.0f : -INFINITY;
                const size_t at = size_t(i * seen_ + cell);
                if (job_.flash)
                    static_cast<ggml_fp16_t *>(mask_->data)[at] = ggml_fp32_to_fp16(bias);
                else
                    static_cast<float *>(mask_->data)[at] = bias;
            }
        }
    }

    const Job &job_;
    int64_t first_, count_, last_position_, seen_;
    ggml_context *ctx_;
    ggml_tensor *q_, *mask_, *out_;
    ggml_cgraph *graph_;
};

} // namespace

int main(int argc, char **argv) {
    if (argc < 2) fail("usage: ggml-attention FILE name=value ...");
    const Job job{Options(argc, argv)};
    char *const q_rows = map_file(argv[1], job.file_bytes());
    char *const k_rows = q_rows + job.q_bytes();
    char *const v_rows = k_rows + job.k_bytes();
    char *const out = v_rows + job.v_bytes();

    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_threadpool_params threads = ggml_threadpool_params_default(job.threads);
    ggml_threadpool_t pool = ggml_threadpool_new(&threads); // kept: a call does not pay for starting threads
    ggml_backend_cpu_set_n_threads(backend, job.threads);
    ggml_backend_cpu_set_threadpool(backend, pool);
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    {
        const Cache cache(job, backend, k_rows, v_rows);
        const int64_t last = (job.queries - 1) / job.batch * job.batch;
        Batch(job, cache, allocator, q_rows, last, job.queries - last).run(backend);
        for (int64_t repeat = 0; repeat < job.repeats; repeat++) {
            double seconds = 0;
            for (int64_t first = 0; first < job.queries; first += job.batch) {
                Batch batch(job, cache, allocator, q_rows, first, std::min(job.batch, job.queries - first));
                seconds += batch.run(backend);
                batch.store(out);
            }
            std::printf("%.9f\n", seconds);
        }
    }
    ggml_gallocr_free(allocator);
    ggml_backend_free(backend);
    ggml_threadpool_free(pool);
    return 0;
}
