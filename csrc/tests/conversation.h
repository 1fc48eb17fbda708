// Conversations computed in any cut, layout of cells and company: what must not change a bit.
#pragma once
#include "paged_attn/paged_attn.h"

#include <cstdint>
#include <string>
#include <vector>

struct Story {
    int n_head = 4, n_kv_head = 2, d = 64;
    pa_dtype type = PA_F16;
    std::vector<int> lengths = {1100}; // tokens of each sequence
    int shared = 0;                    // first tokens that all sequences have in common, and whose cells they share
    int window = 0;
    double query_deviation = 1.0;
    float softcap = 0.0f;
    bool sinks = false;
    uint64_t seed = 1;

    std::string text() const;
};

// How the tokens lie, and what the kernel is told.
struct Layout {
    bool permuted = false;  // cells in random order; else as the tokens came
    int gap = 1;            // only every gap-th cell is used
    bool dense = false;     // the mask; else by position
    bool positions = false; // beside a dense mask
};

// Rows of K, V and Q of every token. A token's rows depend on its sequence and position only.
class Conversation {
  public:
    explicit Conversation(const Story &story);
    const Story story;

    // Computes every token in batches of `cut` tokens, those of the sequences mixed (in turns of 1 to 40). alone >= 0: of
    // this sequence only. Rows in the order of sequences and positions: [token][n_head][d].
    std::vector<float> compute(const Layout &layout, int cut, int threads, const char *isa, int alone = -1) const;
    // The rows of one sequence.
    std::vector<float> of_sequence(const std::vector<float> &rows, int sequence) const;

  private:
    struct Token {
        int sequence, position;
    };
    int index(Token token) const; // of its rows
    std::vector<Token> order(int alone) const;

    int64_t row_bytes_;
    std::vector<uint8_t> k_, v_; // [token][n_kv_head] rows
    std::vector<float> q_, sinks_;
    std::vector<int> first_; // token of each sequence
    int n_tokens_ = 0;
};
