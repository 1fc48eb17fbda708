// What llama-server does for its slots: looks up before a prompt, stores after an answer. Included by server-context.cpp
// alone, below server_slot; the calls are placed by ollama_tiering/patchset/llama_server. All of it runs in the main loop.
//
// A row is sound if it is what computing its tokens gives. After a context shift the rows behind it are not, though their
// tokens are known, nor are rows that came into a slot by another way. Only sound rows are stored.
#pragma once

#include "kvt_cache.h"
#include "kvt_checkpoints.h"
#include "kvt_client.h"
#include "kvt_describe.h"
#include "kvt_own_cache.h"
#include "kvt_restore.h"
#include "kvt_saver.h"
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

constexpr milliseconds idle_wait { 10 }; // for rows, where nothing else is to be done

// A prompt that goes on behind all that its slot holds is the next turn of that conversation: what is new in it is hardly
// stored anywhere. A look-up takes time for each token of the prompt, and is made only if a good part of them is new.
constexpr size_t continued_part = 8;

class tier {
public:
    // Off for good without the variable: then every call returns at once.
    explicit tier(server_queue & queue) : queue_(queue) {
        const char * path = std::getenv("OLLAMA_KV_TIER_ENGINE_SOCKET");
        path_ = path != nullptr ? path : "";
    }

    // Once in each turn of the main loop: a little of what waits to be restored, kept or stored. True if nothing is left
    // for the turn to do: all requests wait for their rows.
    bool step(std::vector<server_slot> & slots, common_params & params, std::unique_ptr<server_prompt_cache> & cache) {
        if (path_.empty()) {
            return false;
        }
        own_cache_.turn(look_up_ != nullptr && look_up_->up(), cache, params);
        const auto until = steady_clock::now() + saving_step;
        ++turn_; // each slot is the first in its turn, so that none waits for ever
        for (size_t i = 0; i < slots.size(); ++i) {
            auto & slot = slots[(turn_ + i) % slots.size()];
            try {
                if (slot.state == SLOT_STATE_STARTED && seats_[slot.id].task != slot.task->id) {
                    arrive(slot, params);
                }
                prepare(slot, until);
            } catch (const std::exception & error) { // for instance there is no memory
                SLT_WRN(slot, "kv tiering: %s\n", error.what());
                give_up(slot);
            }
        }
        if (saver_ == nullptr) {
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
                prefilled(own);
            }
        }
        saver_->step(rows, until);
        if (!waits || computes) {
            return false;
        }
        if (!busy) {
            restorer_->wait(idle_wait);
        }
        wake(); // for the next turn: this one ends here
        return true;
    }

    // Before the server looks how much of the prompt its slot holds: what could be restored is in the slot.
    void before_prompt(server_slot & slot) {
        if (saver_ == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        if (!own.open || own.task != slot.task->id) { // nothing is known of it
            leave(slot, 0);
            own.sound.clear();
            own.open = false;
            return;
        }
        own.begun = true;
        own.began = steady_clock::now();
    }

    // Before the server's own cache of prompts takes the slot's rows away, and may give it others. It does so also to a slot
    // that waits, if a request names that slot: then nothing more comes in, and the request goes on from what is there.
    void before_swap(server_slot & slot) {
        if (saver_ == nullptr) {
            return;
        }
        leave(slot, 0);
        seat & own = seats_[slot.id];
        if (own.waits) {
            restorer_->drop(slot.id);
            own.waits = own.open = false;
            own.sound.clear();
            slot.state = SLOT_STATE_STARTED;
        }
    }

    // When the slot is idle again, before it gets another request.
    void after_answer(server_slot & slot) {
        const auto found = seats_.find(slot.id);
        if (saver_ == nullptr || found == seats_.end() || !found->second.open) {
            return;
        }
        seat & own = found->second;
        own.open = false;
        if (!own.begun) { // it was given up before its prompt
            own.waits = false;
            restorer_->drop(slot.id);
            if (own.brought > 0) { // else the slot is as it was
                own.sound = text_of(slot.prompt.tokens);
                own.sound.resize(std::min<size_t>(own.sound.size(), own.limit));
            }
            return;
        }
        own.sound = text_of(slot.prompt.tokens);
        own.sound.resize(std::min<size_t>(own.sound.size(), own.limit));
        prefilled(own);
        saver_->report(own.report);
        store(slot, own);
    }

    // Before rows behind the first `n_keep` are given other positions.
    void before_shift(std::vector<server_slot> & slots, server_slot & slot, int32_t n_keep) {
        if (saver_ == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        if (own.open && own.begun) {
            own.sound = text_of(slot.prompt.tokens);
            own.sound.resize(std::min<size_t>(own.sound.size(), own.limit));
            store(slot, own);
        }
        if (!exact_) { // all rows of the cache are rounded anew
            for (auto & other : slots) {
                shifted(other, 0);
            }
        }
        shifted(slot, (uint32_t) std::max(n_keep, 0));
    }

private:
    struct seat { // what is known of a slot
        int task = -1;              // the request that it has, or had last
        bool open = false;          // its rows may be stored
        bool waits = false;         // for its rows: SLOT_STATE_WAIT_OTHER, which the server passes over
        bool left = false;          // what is to be stored of its old rows is copied aside
        bool begun = false;         // so has its prompt; before, the slot may hold another request's rows
        bool prefilled = false;
        bool continues = false;     // the prompt has all that the slot held
        uint32_t have = 0;          // rows of the prompt that the slot held
        uint32_t goes_on = 0;       // after so many of them the server goes on; with states fewer than it holds
        uint32_t brought = 0;       // rows that were restored
        uint32_t limit = 0;         // of the request's rows, those before it are sound
        std::vector<int32_t> text;  // the prompt, up to its first image
        marks others;               // checkpoints of the request before, which are none of this one's
        std::vector<int32_t> sound; // tokens whose rows the slot held after its last request, as far as they are sound
        finished report;
        steady_clock::time_point began;
    };

    // Both connections, with the first prompt: only then all is known that the rows depend on.
    bool connect(const server_slot & slot, const common_params & params) {
        if (saver_ == nullptr) {
            said_     = describe_server(params, slot.ctx_tgt, slot.ctx_dft != nullptr || slot.spec != nullptr);
            look_up_  = std::make_unique<client>(path_, said_);
            if (!said_.unsupported.empty()) {
                SRV_INF("kv tiering is off: %s\n", said_.unsupported.c_str());
                path_.clear();
                return false;
            }
            waiting_  = std::make_unique<client>(path_, said_);
            storing_  = std::make_unique<client>(path_, said_);
            exact_    = shifts_exactly(slot.ctx_tgt);
            restorer_ = std::make_unique<restorer>(*look_up_, *waiting_, said_);
            saver_    = std::make_unique<saver>(*storing_, *look_up_, said_, [this] { wake(); });
        }
        return true;
    }

    // The slot has got a request. Those of which nothing is looked up go on as they are.
    void arrive(server_slot & slot, const common_params & params) {
        const server_task & task = *slot.task;
        const bool answered = !task.tokens.empty() && task.n_tokens() < slot.n_ctx;
        if (!task.params.cache_prompt || !answered || !slot.can_split() || !connect(slot, params)) {
            return;
        }
        seat & own = seats_[slot.id];
        const auto held = text_of(slot.prompt.tokens);
        own.task  = task.id;
        own.text  = text_of(task.tokens);
        own.have  = common_prefix(held, own.text);
        own.continues = own.have > 0 && own.have == slot.prompt.tokens.size();
        own.waits = own.open = own.left = own.begun = own.prefilled = false;
        own.brought = 0;
        own.goes_on = own.have;
        own.others.clear();
        if (said_.states) {
            own.others = marks_behind(slot.prompt.checkpoints, own.have);
            own.goes_on = goes_on_after(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, own.have, (uint32_t) task.tokens.size());
        }
        restorer_->drop(slot.id);
        if (!task.need_logits() || !slot.lora.empty()) {
            return;
        }
        const uint32_t sound = common_prefix(own.sound, own.text);
        own.open   = own.waits = true;
        own.limit  = sound >= own.have ? UINT32_MAX : sound;
        own.report = {};
        own.report.prompt_tokens = (uint32_t) task.tokens.size();
        own.report.memory_tokens = std::min(own.goes_on, own.report.prompt_tokens - 1);
        slot.state = SLOT_STATE_WAIT_OTHER;
    }

    // A slot that waits: first what it is about to lose is copied aside, then what is stored comes in.
    void prepare(server_slot & slot, steady_clock::time_point until) {
        seat & own = seats_[slot.id];
        if (!own.waits) {
            return;
        }
        if (!own.left) {
            slot_rows rows;
            rows.add(slot);
            if (!saver_->keep(slot.id, own.goes_on, rows, until)) {
                return;
            }
            own.left = true;
            look_up(slot, own);
        }
        if (restorer_->busy(slot.id) && !bring(slot, own, until)) {
            return;
        }
        own.waits = false;
        slot.state = SLOT_STATE_STARTED;
    }

    void look_up(const server_slot & slot, seat & own) {
        const uint32_t least = look_up_->greeting().min_tokens;
        if (slot.task->params.n_cache_reuse > 0) { // it moves rows, too
            shifted(slot, own.have);
            own.report.reason = shortfall_not_looked_up;
        } else if (own.text.size() < (size_t) own.goes_on + 1 + least) { // as the sidecar would say
            own.report.reason = own.text.size() > own.goes_on ? shortfall_too_short : shortfall_none;
        } else if (own.continues && own.text.size() - own.goes_on < own.text.size()/continued_part) {
            own.report.reason = shortfall_not_looked_up;
        } else {
            restorer_->begin(slot.id, own.text, own.goes_on, own.have);
        }
    }

    // True when all has come that will.
    bool bring(server_slot & slot, seat & own, steady_clock::time_point until) {
        if (!exact_ && shift_waits(slot.ctx_tgt)) {
            restorer_->drop(slot.id);
            own.limit = 0;
            own.report.reason = shortfall_not_looked_up;
            return true;
        }
        slot_cells cells(slot, own.text);
        const bool over = restorer_->step(slot.id, cells, until, own.report);
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
        if (restorer_ != nullptr) {
            restorer_->drop(slot.id);
        }
        if (own.waits) {
            slot.state = SLOT_STATE_STARTED;
        }
        clear_slot(slot);
        own.task = slot.task->id;
        own.waits = own.open = false;
        own.sound.clear();
    }

    // The slot's rows from `from` on go: what is to be stored of them is copied aside.
    void leave(const server_slot & slot, uint32_t from) {
        slot_rows rows;
        rows.add(slot);
        saver_->keep(slot.id, from, rows);
    }

    void shifted(const server_slot & slot, uint32_t from) {
        leave(slot, from);
        seat & own = seats_[slot.id];
        own.limit = std::min(own.limit, from);
        own.sound.resize(std::min<size_t>(own.sound.size(), from));
    }

    void store(server_slot & slot, const seat & own) {
        forget(slot.prompt.checkpoints, own.others);
        if (own.sound.size() <= look_up_->greeting().min_tokens || !storing_->stands()) {
            return;
        }
        std::vector<state> states;
        uint32_t windows = UINT32_MAX;
        if (said_.states) {
            windows = first_window(slot.ctx_tgt, slot.id, (uint32_t) own.sound.size());
            size_t room = saver_->room(); // copying takes the main loop's time: not what would then be thrown away
            const auto wanted = [&](uint32_t n_tokens, size_t bytes) {
                const bool wants = bytes <= room && !saver_->has_state(slot.id, own.sound, n_tokens);
                room -= wants ? bytes : 0;
                return wants;
            };
            const bool whole = (int) own.sound.size() == slot.prompt.n_tokens();
            states = copy_states(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, (uint32_t) own.sound.size(), whole, wanted);
        }
        const uint32_t restored = own.report.restored_tokens;
        saver_->add(slot.id, own.sound, restored > 0 ? own.report.memory_tokens + restored : 0, std::move(states), windows);
    }

    static void prefilled(seat & own) {
        if (!own.prefilled) {
            own.report.prefill_seconds = std::chrono::duration<double>(steady_clock::now() - own.began).count();
            own.prefilled = true;
        }
    }

    void wake() {
        server_task task(SERVER_TASK_TYPE_NEXT_RESPONSE);
        task.id = queue_.get_new_id();
        queue_.post(std::move(task));
    }

    server_queue & queue_;
    std::string path_;
    hello said_;
    own_cache own_cache_;
    bool exact_ = false;
    size_t turn_ = 0;
    std::map<int, seat> seats_;
    std::unique_ptr<client> look_up_;
    std::unique_ptr<client> waiting_; // for files that have to be fetched first
    std::unique_ptr<client> storing_;
    std::unique_ptr<restorer> restorer_; // these two use the clients
    std::unique_ptr<saver> saver_;
};

} // namespace kvt
