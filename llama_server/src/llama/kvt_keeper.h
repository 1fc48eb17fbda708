// What becomes of the rows that llama-server's slots hold: stored after an answer, copied aside before they are lost, given up where
// something was thrown. Included by server-context.cpp alone, below server_slot.
#pragma once

#include "kvt_checkpoints.h"
#include "kvt_complete.h"
#include "kvt_links.h"
#include "kvt_seats.h"
#include "kvt_slots.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvt {

constexpr milliseconds last_storing { 5000 }; // when the server ends, or sleeps
constexpr milliseconds losing_step { 100 }; // to copy aside what a slot loses at once; what it takes longer for is not stored

class keeper {
protected:
    void begin_anew() {
        links_.close();
        seats_.clear();
        complete_ = false;
        incomplete_.clear();
    }

    // The request goes on as in stock, with an empty slot: whatever was half done is gone.
    void give_up(server_slot & slot) {
        seat & own = seats_[slot.id];
        if (links_.restorer != nullptr) {
            links_.restorer->drop(slot.id);
        }
        if (own.waits) {
            slot.state = SLOT_STATE_STARTED;
        }
        clear_slot(slot);
        own.task = slot.task != nullptr ? slot.task->id : -1;
        own.waits = own.ended = false;
        own.forget_rows();
    }

    // What an answer has left is stored, if it is still there.
    void ended(server_slot & slot) {
        const auto found = seats_.find(slot.id);
        if (links_.saver == nullptr || found == seats_.end() || !found->second.ended) {
            return;
        }
        seat & own = found->second;
        own.ended = false;
        if (!own.open) {
            own.forget_rows(); // they are those of a request that was not tiered
            return;
        }
        own.open = false;
        if (!own.begun) { // it was given up before its prompt
            own.waits = false;
            links_.restorer->drop(slot.id);
            if (own.brought > 0) { // else the slot is as it was
                own.note_sound(slot);
            }
            return;
        }
        if (common_prefix(tokens_of(slot.prompt.tokens), own.sound) < own.sound.size()) {
            own.forget_rows(); // computing them has failed
            return;
        }
        own.note_prefilled();
        own.report.failures = (*links_.look_up)->failures();
        links_.saver->report(own.report);
        store(slot, own);
    }

    // The slot's rows from `from` on go: what is to be stored of them is copied aside, as far as there is time.
    void leave(const server_slot & slot, uint32_t from) {
        slot_rows rows;
        rows.add(slot);
        if (!links_.saver->keep(slot.id, from, rows, steady_clock::now() + losing_step)) {
            links_.saver->lose(slot.id, from);
        }
    }

    // All of them, for others of which nothing is known.
    void lose_rows(const server_slot & slot) {
        safely(slot, [&] { leave(slot, 0); });
        if (const auto found = seats_.find(slot.id); found != seats_.end()) {
            found->second.forget_rows();
        }
    }

    // Rows of the slot from `from` on get other positions.
    void moves(std::vector<server_slot> & slots, const server_slot & slot, uint32_t from) {
        for (const auto & one : slots) {
            if (!links_.exact || one.id == slot.id) { // else all rows of the cache are rounded anew
                const uint32_t first = links_.exact ? from : 0;
                safely(one, [&] { leave(one, first); });
                if (const auto found = seats_.find(one.id); found != seats_.end()) {
                    found->second.note_moved(first);
                }
            }
        }
    }

    // What is thrown costs the rows that are not stored yet, and no more. False then.
    template <typename Work>
    bool safely(const server_slot & slot, const Work & work) {
        try {
            work();
            return true;
        } catch (const std::exception & error) {
            SLT_WRN(slot, "kv tiering: %s\n", error.what());
            links_.saver->lose(slot.id, 0);
            return false;
        }
    }

    // Of the rows of these tokens.
    bool can_store(const server_slot & slot, const std::vector<int32_t> & tokens) {
        if (tokens.size() <= (*links_.look_up)->greeting().min_tokens || !(*links_.storing)->stands()) {
            return false;
        }
        if (!complete_) {
            incomplete_ = why_incomplete(slot.ctx_tgt, slot.id);
            complete_ = incomplete_.empty();
        }
        return complete_;
    }

    // A part of what the slot has computed so far is stored. True if there was no time for all of it.
    bool store_part(const server_slot & slot, steady_clock::time_point until) {
        const auto found = seats_.find(slot.id);
        const bool computes = slot.state == SLOT_STATE_PROCESSING_PROMPT || slot.state == SLOT_STATE_GENERATING;
        if (!computes || found == seats_.end() || !found->second.open || !found->second.begun) {
            return false;
        }
        seat & own = found->second;
        const auto left = until - steady_clock::now();
        if (own.on_the_way.allowed(steady_clock::now()) <= left.zero()) {
            return false;
        }
        settle(slot.ctx_tgt); // a device that still computes is not kept from it
        const auto begin = steady_clock::now();
        ahead got { own.on_the_way.handed(), false };
        auto tokens = own.sound_of(slot);
        if (tokens.size() >= got.handed + block_tokens && can_store(slot, tokens)) {
            slot_rows rows;
            rows.add(slot);
            const auto most = std::min<progress::nanoseconds>(left, own.on_the_way.allowed(begin));
            got = links_.saver->add_ahead(slot.id, std::move(tokens), got.handed, rows, begin + most);
        }
        const auto end = steady_clock::now();
        own.on_the_way.note(begin, end, got.handed, got.more);
        return got.more && own.on_the_way.allowed(end) > left.zero();
    }

    // The rows go with the server: what was asked for, and what is computed of requests that have not ended, is stored as far as
    // there is time.
    void store_last(std::vector<server_slot> & slots, steady_clock::time_point until) {
        for (auto & slot : slots) {
            safely(slot, [&] {
                const auto found = seats_.find(slot.id);
                if (slot.is_processing() && found != seats_.end() && found->second.open && found->second.begun) {
                    found->second.note_sound(slot);
                    found->second.ended = true;
                }
                ended(slot);
            });
        }
        while (links_.saver->jobs() > 0 && steady_clock::now() < until) {
            slot_rows rows;
            for (const auto & slot : slots) {
                rows.add(slot);
            }
            links_.saver->step(rows, steady_clock::now() + saving_step);
            std::this_thread::sleep_for(milliseconds(1));
        }
    }

    void store(server_slot & slot, const seat & own) {
        forget(slot.prompt.checkpoints, own.others);
        if (!can_store(slot, own.sound)) {
            return;
        }
        std::vector<state> states;
        uint32_t windows = UINT32_MAX;
        if (links_.said.states) {
            windows = first_window(slot.ctx_tgt, slot.id, (uint32_t) own.sound.size());
            size_t room = links_.saver->room(); // copying takes the main loop's time: not what would then be thrown away
            const auto wanted = [&](uint32_t n_tokens, size_t bytes) {
                const bool wants = bytes <= room && !links_.saver->has_state(slot.id, own.sound, n_tokens);
                room -= wants ? bytes : 0;
                return wants;
            };
            const bool whole = (int) own.sound.size() == slot.prompt.n_tokens();
            states = copy_states(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, own.sound, whole, wanted);
        }
        links_.saver->add(slot.id, own.sound, std::move(states), windows);
    }

    std::map<int, seat> seats_;
    links links_;
    bool complete_ = false;  // what is stored of a sequence is all that there is
    std::string incomplete_; // what it lacks
};

} // namespace kvt
