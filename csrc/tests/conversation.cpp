#include "tests/conversation.h"

#include "src/check.h"
#include "tests/problem.h"
#include "tests/testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace {

using Random = std::mt19937_64;

void fill(Random &random, pa_dtype type, int d, float mean, std::vector<uint8_t> &bytes) {
    static const std::vector<float> pool = [] { // drawing each value anew would take longer than the tests
        Random seeded(1);
        std::normal_distribution<float> normal;
        std::vector<float> values(4099);
        for (float &value : values) value = normal(seeded);
        return values;
    }();
    const auto row = size_t(paged_attn::row_bytes(type, d));
    const size_t block = type == PA_Q8_0 ? 34 : 18;
    for (size_t at = 0; at < bytes.size(); at += row) {
        size_t from = random() % pool.size();
        for (size_t i = 0; i < size_t(d) && type <= PA_BF16; i++, from = (from + 1) % pool.size()) {
            const float value = pool[from] + mean;
            const uint16_t half = to_f16(value);
            if (type == PA_F32) std::memcpy(&bytes[at + 4 * i], &value, 4);
            if (type == PA_F16) std::memcpy(&bytes[at + 2 * i], &half, 2);
            if (type == PA_BF16) std::memcpy(&bytes[at + 2 * i], reinterpret_cast<const uint8_t *>(&value) + 2, 2);
        }
        for (size_t b = 0; b < row && type > PA_BF16; b += block) {
            const uint16_t scale = to_f16((type == PA_Q8_0 ? 3.0f / 127.0f : 3.0f / 8.0f) * (0.5f + float(random() % 1000) / 1000.0f));
            std::memcpy(&bytes[at + b], &scale, 2);
            for (size_t i = 2; i < block; i++) bytes[at + b + i] = uint8_t(random());
        }
    }
}

} // namespace

std::string Story::text() const {
    char line[300];
    std::snprintf(line, sizeof line, "heads %d/%d d %d type %d, %zu sequences, first %d tokens, %d shared, window %d, deviation %g, softcap %g, sinks %d, seed %llu",
                  n_head, n_kv_head, d, int(type), lengths.size(), lengths[0], shared, window, query_deviation,
                  double(softcap), sinks, static_cast<unsigned long long>(seed));
    return line;
}

Conversation::Conversation(const Story &its_story) : story(its_story), row_bytes_(paged_attn::row_bytes(story.type, story.d)) {
    Random random(story.seed);
    for (const int length : story.lengths) {
        first_.push_back(n_tokens_);
        n_tokens_ += length;
    }
    const auto rows = size_t(n_tokens_ * story.n_kv_head);
    k_.resize(rows * size_t(row_bytes_));
    v_.resize(rows * size_t(row_bytes_));
    fill(random, story.type, story.d, 0.0f, k_);
    fill(random, story.type, story.d, 0.3f, v_);
    std::normal_distribution<float> normal;
    q_.resize(size_t(n_tokens_ * story.n_head * story.d));
    for (float &value : q_) value = normal(random) * float(story.query_deviation);
    for (int h = 0; h < story.n_head && story.sinks; h++) sinks_.push_back(normal(random));
    for (size_t s = 1; s < first_.size(); s++) { // the common beginning is the same text
        const auto bytes = size_t(story.shared * story.n_kv_head) * size_t(row_bytes_);
        const auto at = size_t(first_[s] * story.n_kv_head) * size_t(row_bytes_);
        std::copy_n(k_.begin(), bytes, k_.begin() + long(at));
        std::copy_n(v_.begin(), bytes, v_.begin() + long(at));
        const auto values = size_t(story.n_head * story.d);
        std::copy_n(q_.begin(), values * size_t(story.shared), q_.begin() + long(size_t(first_[s]) * values));
    }
}

int Conversation::index(Token token) const { return first_[size_t(token.sequence)] + token.position; }

std::vector<Conversation::Token> Conversation::order(int alone) const {
    Random random(story.seed + 99);
    std::vector<Token> tokens;
    const auto sequences = int(story.lengths.size());
    std::vector<int> done(size_t(sequences), 0);
    for (int s = 0; s < sequences; s++) done[size_t(s)] = s > 0 && alone < 0 ? story.shared : 0; // computed with the first
    for (int p = 0; p < story.shared && alone < 0; p++) tokens.push_back({0, done[0]++});
    for (int left = sequences; left > 0;) {
        const int s = alone >= 0 ? alone : int(random() % uint64_t(sequences)), length = story.lengths[size_t(s)];
        for (int turn = 1 + int(random() % 40); turn > 0 && done[size_t(s)] < length; turn--) tokens.push_back({s, done[size_t(s)]++});
        left = 0;
        for (int other = 0; other < sequences; other++)
            left += (alone < 0 || other == alone) && done[size_t(other)] < story.lengths[size_t(other)];
    }
    return tokens;
}

std::vector<float> Conversation::of_sequence(const std::vector<float> &rows, int sequence) const {
    const long values = story.n_head * story.d;
    const auto from = rows.begin() + first_[size_t(sequence)] * values;
    return {from, from + story.lengths[size_t(sequence)] * values};
}

std::vector<float> Conversation::compute(const Layout &layout, int cut, int threads, const char *isa, int alone) const {
    const std::vector<Token> tokens = order(alone);
    const auto n = int(tokens.size()), n_cells = n * layout.gap;
    std::vector<int> cell_of(static_cast<size_t>(n));
    std::iota(cell_of.begin(), cell_of.end(), 0);
    for (int &cell : cell_of) cell = cell * layout.gap + layout.gap / 2;
    if (layout.permuted) std::shuffle(cell_of.begin(), cell_of.end(), Random(story.seed + 7));

    const int64_t cell_bytes = row_bytes_ * story.n_kv_head;
    std::vector<uint8_t> k(size_t(n_cells * cell_bytes), 0xFF), v = k; // NaN where no token lies
    std::vector<int32_t> pos(size_t(n_cells), -1), seq(size_t(n_cells), -1);
    pa_shape shape{};
    shape.n_head = story.n_head;
    shape.n_kv_head = story.n_kv_head;
    shape.d_k = shape.d_v = story.d;
    shape.max_q = cut;
    shape.max_cells = n_cells;
    shape.k_type = shape.v_type = story.type;
    shape.scale = float(1.0 / std::sqrt(double(story.d)));
    shape.softcap = story.softcap;
    const Plan plan(shape, threads, isa);
    const auto row_values = size_t(story.n_head * story.d);
    std::vector<float> out(size_t(n_tokens_) * row_values, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> q(size_t(cut) * row_values), result(q.size());
    std::vector<uint16_t> dense(layout.dense ? size_t(cut) * size_t(n_cells) : 0);
    std::vector<int32_t> query_pos(static_cast<size_t>(cut)), query_seq(query_pos.size());

    const auto sees = [&](Token token, int cell) {
        const int at = pos[size_t(cell)], of = seq[size_t(cell)];
        const bool its = of == token.sequence || (of == 0 && at < story.shared);
        return at >= 0 && its && at <= token.position && (story.window == 0 || token.position - at < story.window);
    };
    for (int first = 0; first < n; first += cut) {
        const int n_q = std::min(cut, n - first);
        for (int i = 0; i < n_q; i++) {
            const Token token = tokens[size_t(first + i)];
            const int cell = cell_of[size_t(first + i)];
            const int64_t row = index(token) * cell_bytes;
            std::copy_n(k_.begin() + row, cell_bytes, k.begin() + cell * cell_bytes);
            std::copy_n(v_.begin() + row, cell_bytes, v.begin() + cell * cell_bytes);
            pos[size_t(cell)] = token.position;
            seq[size_t(cell)] = token.sequence;
            query_pos[size_t(i)] = token.position;
            query_seq[size_t(i)] = token.sequence;
            std::copy_n(q_.begin() + long(size_t(index(token)) * row_values), row_values, q.begin() + long(size_t(i) * row_values));
        }
        const void *k_page = k.data(), *v_page = v.data();
        pa_args args{};
        args.n_q = n_q;
        args.n_cells = layout.permuted ? n_cells : (first + n_q) * layout.gap;
        args.q = q.data();
        args.q_head_stride = int64_t(sizeof(float)) * story.d;
        args.q_stride = args.q_head_stride * story.n_head;
        args.k = {&k_page, 1, n_cells, cell_bytes, row_bytes_};
        args.v = {&v_page, 1, n_cells, cell_bytes, row_bytes_};
        if (layout.dense) {
            for (int i = 0; i < n_q; i++)
                for (int c = 0; c < args.n_cells; c++)
                    dense[size_t(i) * size_t(args.n_cells) + size_t(c)] = sees(tokens[size_t(first + i)], c) ? 0 : 0xFC00;
            args.mask.dense = dense.data();
            args.mask.dense_stride = 2 * args.n_cells;
            args.mask.cell_pos = layout.positions ? pos.data() : nullptr;
        } else {
            args.mask = {nullptr, 0, pos.data(), seq.data(), query_pos.data(), query_seq.data(), story.window};
        }
        args.sinks = story.sinks ? sinks_.data() : nullptr;
        args.out = result.data();
        const pa_status status = pa_cpu_run(plan.get(), &args);
        EXPECT(status == PA_OK, "%s: %s: %s", isa, pa_last_error(), story.text().c_str());
        if (status != PA_OK) return {};
        for (int i = 0; i < n_q; i++)
            std::copy_n(result.begin() + long(size_t(i) * row_values), row_values,
                        out.begin() + long(size_t(index(tokens[size_t(first + i)])) * row_values));
    }
    return out;
}
