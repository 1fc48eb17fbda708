// What llama-server does for its slots: looks up before a prompt, stores after an answer. Included by server-context.cpp
// alone, below server_slot; the calls are placed by ollama_tiering/patchset/llama_server. All of it runs in the main loop.
// Nothing is thrown into the server: where memory is lacking, it goes on as stock.
#pragma once

#include "kvt_cache.h"
#include "kvt_checkpoints.h"
#include "kvt_describe.h"
#include "kvt_links.h"
#include "kvt_loaded.h"
#include "kvt_own_cache.h"
#include "kvt_refused.h"
#include "kvt_seats.h"
#include "kvt_slots.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvt {

constexpr milliseconds idle_wait { 10 };    // for rows, where nothing else is to be done
constexpr milliseconds losing_step { 100 }; // to copy aside what a slot loses at once; what it takes longer for is not stored

// A prompt that goes on behind all that its slot holds is the next turn of that conversation: what is new in it is hardly
// stored anywhere. A look-up takes time for each token of the prompt, and is made only if a good part of them is new.
constexpr size_t continued_part = 8;

class tier {
public:
    // Off for good without the variable: then every call returns at once.
    explicit tier(server_queue & queue) : queue_(queue) {
        const char * path = std::getenv("OLLAMA_KV_TIER_ENGINE_SOCKET");
        given_ = path_ = path != nullptr ? path : "";
    }

    // Before the model is loaded, also again after the server has slept: nothing is known of what was before.
    void before_load(const common_params & params) {
        links_.close();
        seats_.clear();
        path_ = given_;
        loaded_ = path_.empty() ? loaded_file() : look_at(params.model.path);
    }

    // Once in each turn of the main loop: a little of what waits to be restored, kept or stored. True if nothing is left
    // for the turn to do: all requests wait for their rows.
    bool step(std::vector<server_slot> & slots, common_params & params, std::unique_ptr<server_prompt_cache> & cache) {
        if (path_.empty()) {
            return false;
        }
        own_cache_.turn(links_.look_up != nullptr && links_.look_up->up(), cache, params);
        const auto until = steady_clock::now() + saving_step;
        ++turn_; // each slot is the first in its turn, so that none waits for ever
        for (size_t i = 0; i < slots.size(); ++i) {
            auto & slot = slots[(turn_ + i) % slots.size()];
            try {
                ended(slot);
                arrived(slot, params);
                prepare(slots, slot, until);
            } catch (const std::exception & error) { // for instance there is no memory
                SLT_WRN(slot, "kv tiering: %s\n", error.what());
                give_up(slot);
            }
        }
        if (links_.saver == nullptr) {
            return false;
        }
        slot_rows rows;
        bool waits = false;
        bool busy = false; // with what the main loop does itself
        bool computes = false;
        for (auto & slot : slots) {
            rows.add(slot);
            seat & own = seats_[slot.id];
            waits    = waits || own.waits;
            busy     = busy || (own.waits && !own.left);
            computes = computes || (slot.is_processing() && slot.state != SLOT_STATE_WAIT_OTHER);
            const bool prompt = slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_PROCESSING_PROMPT;
            if (own.open && !own.waits && !prompt) {
                own.note_prefilled();
            }
        }
        links_.saver->step(rows, until);
        if (!waits || computes) {
            return false;
        }
        if (!busy) {
            links_.restorer->wait(idle_wait);
        }
        wake(); // for the next turn: this one ends here
        return true;
    }

    // Before the server looks how much of the prompt its slot holds: what could be restored is in the slot.
    void before_prompt(server_slot & slot) {
        if (links_.saver == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        if (!own.open || own.task != slot.task->id) { // nothing is known of it
            lose_rows(slot);
            return;
        }
        own.begun = true;
        own.began = steady_clock::now();
    }

    // Before the server's own cache of prompts takes the slot's rows away, and may give it others. It does so also to a slot
    // that waits, if a request names that slot: then nothing more comes in, and the request goes on from what is there.
    void before_swap(server_slot & slot) {
        if (links_.saver == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        if (!safely(slot, [&] {
                ended(slot);
                own.swapped = text_of(slot.prompt.tokens);
            })) {
            own.forget_rows();
        }
        safely(slot, [&] { leave(slot, 0); });
        if (own.waits) {
            links_.restorer->drop(slot.id);
            own.waits = false;
            own.forget_rows();
            slot.state = SLOT_STATE_STARTED;
        }
    }

    // Before a slot gets rows out of a file, which another server may have written.
    void before_slot_file(server_slot * slot) {
        if (links_.saver != nullptr && slot != nullptr && !slot->is_processing()) {
            safely(*slot, [&] { ended(*slot); });
            lose_rows(*slot);
        }
    }

    // When the slot is idle again. Its rows are looked at in the next turn: if computing them has failed, the server clears
    // the slot after this call.
    void after_answer(server_slot & slot) {
        const auto found = seats_.find(slot.id);
        if (links_.saver != nullptr && found != seats_.end()) {
            safely(slot, [&] {
                found->second.ended = true;
                if (found->second.open && found->second.begun) {
                    found->second.note_sound(slot);
                }
                wake();
            });
        }
    }

    // Before rows behind the first `n_keep` are given other positions.
    void before_shift(std::vector<server_slot> & slots, server_slot & slot, int32_t n_keep) {
        if (links_.saver == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        safely(slot, [&] {
            if (own.open && own.begun) {
                own.note_sound(slot);
                store(slot, own);
            }
        });
        moves(slots, slot, (uint32_t) std::max(n_keep, 0));
    }

private:
    // With the first prompt: only then all is known that the rows depend on.
    bool connect(const server_slot & slot, const common_params & params) {
        if (links_.saver == nullptr) {
            const hello said = describe_server(params, slot.ctx_tgt, slot.ctx_dft != nullptr || slot.spec != nullptr, loaded_);
            if (!links_.open(path_, said, shifts_exactly(slot.ctx_tgt), [this] { wake(); })) {
                SRV_INF("kv tiering is off: %s\n", said.unsupported.c_str());
                path_.clear();
                return false;
            }
        }
        return true;
    }

    // Looks whether the slot has got a request. Those of which nothing is looked up go on as they are.
    void arrived(server_slot & slot, const common_params & params) {
        if (links_.saver != nullptr && slot.state == SLOT_STATE_WAIT_OTHER && seats_[slot.id].task != slot.task->id) {
            seats_[slot.id].task = slot.task->id; // a further answer: it gets the rows of the first one's slot
            lose_rows(slot);
            return;
        }
        if (slot.state != SLOT_STATE_STARTED || seats_[slot.id].task == slot.task->id) {
            return;
        }
        const server_task & task = *slot.task;
        const bool answered = !task.tokens.empty() && task.n_tokens() < slot.n_ctx;
        if (!task.params.cache_prompt || !answered || !slot.can_split() || !connect(slot, params)) {
            return;
        }
        seat & own = seats_[slot.id];
        own.begin(task, slot);
        if (links_.said.states) {
            own.others = marks_behind(slot.prompt.checkpoints, own.have);
            own.goes_on = goes_on_after(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, own.have, (uint32_t) task.tokens.size());
        }
        links_.restorer->drop(slot.id);
        if (!task.need_logits() || !slot.lora.empty()) {
            return;
        }
        own.wait((uint32_t) task.tokens.size());
        slot.state = SLOT_STATE_WAIT_OTHER;
    }

    // A slot that waits: first what it is about to lose is copied aside, then what is stored comes in.
    void prepare(std::vector<server_slot> & slots, server_slot & slot, steady_clock::time_point until) {
        seat & own = seats_[slot.id];
        if (!own.waits) {
            return;
        }
        if (!own.left) {
            slot_rows rows;
            rows.add(slot);
            if (!links_.saver->keep(slot.id, own.goes_on, rows, until)) {
                return;
            }
            own.left = true;
            look_up(slots, slot, own);
        }
        if (links_.restorer->busy(slot.id) && !bring(slot, own, until)) {
            return;
        }
        own.waits = false;
        slot.state = SLOT_STATE_STARTED;
    }

    void look_up(std::vector<server_slot> & slots, const server_slot & slot, seat & own) {
        const uint32_t least = links_.look_up->greeting().min_tokens;
        if (slot.task->params.n_cache_reuse > 0 && slot.prompt.tokens.size() > own.have) { // it moves rows, too, if there are others
            moves(slots, slot, own.have);
            own.report.reason = shortfall_not_looked_up;
        } else if (own.text.size() < (size_t) own.goes_on + 1 + least) { // as the sidecar would say
            own.report.reason = own.text.size() > own.goes_on ? shortfall_too_short : shortfall_none;
        } else if (own.continues && own.text.size() - own.goes_on < own.text.size()/continued_part) {
            own.report.reason = shortfall_not_looked_up;
        } else {
            links_.restorer->begin(slot.id, own.text, own.goes_on, own.have, has_places(slot));
        }
    }

    // True when all has come that will.
    bool bring(server_slot & slot, seat & own, steady_clock::time_point until) {
        if (!links_.exact && shift_waits(slot.ctx_tgt)) {
            links_.restorer->drop(slot.id);
            own.limit = 0;
            own.report.reason = shortfall_not_looked_up;
            return true;
        }
        slot_cells cells(slot, own.text);
        const bool over = links_.restorer->step(slot.id, cells, until, own.report);
        own.brought += cells.rows();
        if (!over) {
            return false;
        }
        if (own.report.restored_tokens > 0) {
            SLT_INF(slot, "kv tiering: restored %u rows behind %u, %.1f MiB: look-up %.1f ms, reading %.1f ms, copying %.1f ms\n",
                    own.report.restored_tokens, own.goes_on, (double) own.report.restored_bytes/1048576,
                    own.report.lookup_seconds*1e3, own.report.fetch_seconds*1e3, own.report.copy_seconds*1e3);
        }
        if (own.report.reason == shortfall_none && own.text.size() < own.report.prompt_tokens) {
            own.report.reason = shortfall_not_text;
        }
        return true;
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
        if (common_prefix(text_of(slot.prompt.tokens), own.sound) < own.sound.size()) {
            own.forget_rows(); // computing them has failed
            return;
        }
        own.note_prefilled();
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
        seats_[slot.id].forget_rows();
    }

    // Rows of the slot from `from` on get other positions.
    void moves(std::vector<server_slot> & slots, const server_slot & slot, uint32_t from) {
        for (const auto & one : slots) {
            if (!links_.exact || one.id == slot.id) { // else all rows of the cache are rounded anew
                const uint32_t first = links_.exact ? from : 0;
                safely(one, [&] { leave(one, first); });
                seats_[one.id].note_moved(first);
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

    void store(server_slot & slot, const seat & own) {
        forget(slot.prompt.checkpoints, own.others);
        if (own.sound.size() <= links_.look_up->greeting().min_tokens || !links_.storing->stands()) {
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
            states = copy_states(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, (uint32_t) own.sound.size(), whole, wanted);
        }
        const uint32_t restored = own.report.restored_tokens;
        links_.saver->add(slot.id, own.sound, restored > 0 ? own.report.memory_tokens + restored : 0, std::move(states), windows);
    }

    void wake() {
        server_task task(SERVER_TASK_TYPE_NEXT_RESPONSE);
        task.id = queue_.get_new_id();
        queue_.post(std::move(task));
    }

    server_queue & queue_;
    std::string given_; // by the variable
    std::string path_;
    loaded_file loaded_; // the model's file, before it was loaded
    own_cache own_cache_;
    size_t turn_ = 0;
    std::map<int, seat> seats_;
    links links_;
};

} // namespace kvt
