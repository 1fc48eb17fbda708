// What is known of llama-server's slots, one seat each. Included by server-context.cpp alone, below server_slot.
//
// A row is sound if it is what computing its tokens gives. After a context shift the rows behind it are not, though their
// tokens are known, nor are rows that came into a slot by another way. Only sound rows are stored.
#pragma once

#include "kvt_checkpoints.h"
#include "kvt_client.h"
#include "kvt_progress.h"
#include "kvt_slots.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvt {

struct seat {
    int task = -1;              // the request that it has, or had last
    bool open = false;          // its rows may be stored
    bool waits = false;         // for its rows: SLOT_STATE_WAIT_OTHER, which the server passes over
    bool left = false;          // what is to be stored of its old rows is copied aside
    bool begun = false;         // so has its prompt; before, the slot may hold another request's rows
    bool prefilled = false;
    bool continues = false;     // the prompt has all that the slot held
    bool ended = false;         // so has its request, and nothing was done about it yet
    uint32_t have = 0;          // rows of the prompt that the slot held
    uint32_t goes_on = 0;       // after so many of them the server goes on; with states fewer than it holds
    uint32_t brought = 0;       // rows that were restored
    uint32_t limit = 0;         // of the request's rows, those before it are sound
    std::vector<int32_t> text;  // the prompt, images too, up to the first thing that cannot be named
    marks others;               // checkpoints of the request before, which are none of this one's
    std::vector<int32_t> sound; // tokens whose rows the slot held after its last request, as far as they are sound
    std::optional<std::vector<int32_t>> swapped; // what it held before the server's own cache may have given it other rows
    finished report;
    steady_clock::time_point began;
    progress on_the_way; // what is stored while it is computed

    // The slot has got a request.
    void begin(const server_task & its_task, const server_slot & slot) {
        const auto held = tokens_of(slot.prompt.tokens);
        if (swapped.has_value() && *swapped != held) {
            sound.clear(); // it has got other rows, and they may have been moved before
        }
        swapped.reset();
        task  = its_task.id;
        text  = tokens_of(its_task.tokens);
        have  = common_prefix(held, text);
        goes_on = std::min(have, (uint32_t) its_task.tokens.size() - 1); // the last token is computed again, and so is its row
        continues = have > 0 && have == slot.prompt.tokens.size();
        waits = open = left = begun = prefilled = false;
        brought = 0;
        others.clear();
    }

    // The request waits for its rows.
    void wait(uint32_t prompt_tokens) {
        const uint32_t equal = common_prefix(sound, text);
        open   = waits = true;
        limit  = equal >= have ? UINT32_MAX : equal;
        report = {};
        report.prompt_tokens = prompt_tokens;
        report.memory_tokens = std::min(goes_on, prompt_tokens - 1);
    }

    // Nothing is known of the rows that the slot holds.
    void forget_rows() {
        open = false;
        sound.clear();
        swapped.reset();
    }

    void note_sound(const server_slot & slot) { sound = sound_of(slot); }

    // Between two batches all that the slot says it holds is computed.
    std::vector<int32_t> sound_of(const server_slot & slot) const {
        auto tokens = tokens_of(slot.prompt.tokens);
        tokens.resize(std::min<size_t>(tokens.size(), limit));
        return tokens;
    }

    // Rows from `from` on are no longer what computing their tokens gives.
    void note_moved(uint32_t from) {
        limit = std::min(limit, from);
        sound.resize(std::min<size_t>(sound.size(), from));
    }

    void note_prefilled() {
        if (!prefilled) {
            report.prefill_seconds = std::chrono::duration<double>(steady_clock::now() - began).count();
            prefilled = true;
        }
    }
};

} // namespace kvt
