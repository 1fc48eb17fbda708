// What llama-server does for its slots: looks up before a prompt, stores after an answer. Included by server-context.cpp
// alone, below server_slot; the calls are placed by ollama_tiering/patchset/llama_server. All of it runs in the main loop.
// Nothing is thrown into the server: where memory is lacking, it goes on as stock.
#pragma once

#include "kvt_cache.h"
#include "kvt_checkpoints.h"
#include "kvt_describe.h"
#include "kvt_given.h"
#include "kvt_keeper.h"
#include "kvt_kinds.h"
#include "kvt_own_cache.h"
#include "kvt_pinned.h"
#include "kvt_refused.h"
#include "kvt_slots.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvt {

constexpr milliseconds idle_wait { 10 }; // for rows, where nothing else is to be done

// A prompt that goes on behind all that its slot holds is the next turn of that conversation: what is new in it is hardly
// stored anywhere. A look-up takes time for each token of the prompt, and is made only if a good part of them is new.
constexpr size_t continued_part = 8;

class tiering : keeper {
public:
    // Off for good without the variable: then every call returns at once.
    explicit tiering(server_queue & queue) : queue_(queue) {
        const char * path = std::getenv("OLLAMA_KV_TIER_ENGINE_SOCKET");
        given_ = path_ = path != nullptr ? path : "";
        first_part_ = progress_after(std::getenv("OLLAMA_KV_TIER_PROGRESS_SECONDS"));
    }

    // Before the model is loaded, also again after the server has slept: nothing is known of what was before.
    void before_load(const common_params & params) {
        begin_anew();
        try {
            path_ = given_;
            loaded_ = {};
            if (!path_.empty()) {
                loaded_ = look_at_files(params);
            }
        } catch (const std::exception &) { // there is no memory
            path_.clear();
        }
    }

    // Once in each turn of the main loop: a little of what waits to be restored, kept or stored. True if nothing is left
    // for the turn to do: all requests wait for their rows.
    bool step(std::vector<server_slot> & slots, common_params & params, std::unique_ptr<server_prompt_cache> & cache) {
        try {
            refuse(slots);
            const bool done = !path_.empty() && turn(slots, params, cache);
            refuse(slots); // at once: the next turn comes with the next request
            return done && !path_.empty();
        } catch (const std::exception & error) { // slots that wait go on in a later turn
            SRV_WRN("kv tiering: %s\n", error.what());
            return false;
        }
    }

    // Before the server looks how much of the prompt its slot holds: what could be restored is in the slot.
    void before_prompt(server_slot & slot) {
        if (links_.saver == nullptr) {
            return;
        }
        const auto found = seats_.find(slot.id);
        if (found == seats_.end() || !found->second.open || found->second.task != slot.task->id) { // nothing is known of it
            lose_rows(slot);
            return;
        }
        seat & own = found->second;
        own.begun = true;
        own.began = steady_clock::now();
        // What was restored is known by its fingerprints. So is what an answer has left, when it is stored.
        const size_t known = links_.saver->fingerprints(slot.id, own.text).size()*block_tokens;
        const size_t held = own.brought > 0 ? 0 : own.goes_on/block_tokens*block_tokens;
        own.on_the_way.begin(own.began, first_part_, (uint32_t) std::max(known, held));
    }

    // Before the server's own cache of prompts takes the slot's rows away, and may give it others. It does so also to a slot
    // that waits, if a request names that slot: then nothing more comes in, and the request goes on from what is there.
    void before_swap(server_slot & slot) {
        const auto found = seats_.find(slot.id);
        if (links_.saver == nullptr || found == seats_.end()) {
            return;
        }
        seat & own = found->second;
        if (!safely(slot, [&] {
                ended(slot);
                own.swapped = tokens_of(slot.prompt.tokens);
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
        safely(slot, [&] {
            seat & own = seats_[slot.id];
            if (own.open && own.begun) {
                own.note_sound(slot);
                store(slot, own);
            }
        });
        moves(slots, slot, (uint32_t) std::max(n_keep, 0));
    }

    // Before the rows go: the server ends, also within a request, or it goes to sleep. What follows may read none.
    void before_end(std::vector<server_slot> & slots) {
        try {
            if (links_.saver != nullptr) {
                store_last(slots, steady_clock::now() + last_storing);
            }
        } catch (const std::exception & error) {
            SRV_WRN("kv tiering: %s\n", error.what());
        }
        begin_anew();
    }

private:
    bool turn(std::vector<server_slot> & slots, common_params & params, std::unique_ptr<server_prompt_cache> & cache) {
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
        own_cache_.turn(tiered(), cache, params);
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
        bool more = false;
        for (const auto & slot : slots) {
            more = store_part(slot, until) || more;
        }
        if (more) {
            wake(); // for the next turn: what others want of the main loop comes between
            return true;
        }
        if (!waits || computes) {
            return false;
        }
        if (!busy) {
            links_.restorer->wait(idle_wait);
        }
        wake(); // for the next turn: this one ends here
        return true;
    }

    // Whether the sidecar answers for this model, and what it gets of it is whole, which the first answer shows. While it checks
    // the model's file, and for one that it refuses, the namespace that it says is all zeros.
    bool tiered() const {
        if (links_.saver == nullptr || !complete_ || !(*links_.look_up)->up()) {
            return false;
        }
        const auto name_space = (*links_.look_up)->greeting().name_space;
        const bool named = std::any_of(name_space.begin(), name_space.end(), [](uint8_t byte) { return byte != 0; });
        return named || links_.saver->written_blocks() > 0;
    }

    // What was found out of the first answer: nothing is stored of this model, nor looked up.
    void refuse(std::vector<server_slot> & slots) {
        if (incomplete_.empty()) {
            return;
        }
        for (auto & slot : slots) {
            if (const auto found = seats_.find(slot.id); found != seats_.end() && found->second.waits) {
                give_up(slot);
            }
        }
        hello said = links_.said;
        said.unsupported = std::exchange(incomplete_, "");
        seats_.clear();
        SRV_WRN("kv tiering is off: %s\n", said.unsupported.c_str());
        links_.open(path_, said, false, {}); // the sidecar is told
        path_.clear(); // there are no more turns
    }

    // With the first prompt: only then all is known that the rows depend on.
    bool connect(const server_slot & slot, const common_params & params) {
        if (links_.saver == nullptr) {
            adapters_ = params.lora_adapters;
            const hello said = describe_server(params, slot.ctx_tgt, drafting_of(slot.ctx_tgt, slot.ctx_dft, slot.spec != nullptr), loaded_);
            std::string why;
            const auto parts = parts_of(slot.ctx_tgt, why);
            // Where a window's rows lie follows from the positions of text.
            take_images(!images_refused() && (parts.window == nullptr || !has_axes(slot.ctx_tgt)));
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
            own.goes_on = goes_on_after(slot.ctx_tgt, slot.id, slot.prompt.checkpoints, own.have, (uint32_t) task.tokens.size(), own.text);
        }
        links_.restorer->drop(slot.id);
        if (!task.need_logits()) {
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
        const uint32_t least = (*links_.look_up)->greeting().min_tokens;
        const bool named = are_lora_equal(slot.lora, adapters_);
        own.limit = named ? own.limit : 0; // what is computed with other scales has no name
        if (slot.task->params.n_cache_reuse > 0 && slot.prompt.tokens.size() > own.have) { // it moves rows, too, if there are others
            moves(slots, slot, own.have);
            own.report.reason = shortfall_not_looked_up;
        } else if (!named) {
            own.report.reason = shortfall_not_looked_up;
        } else if (own.text.size() < (size_t) own.goes_on + 1 + least) { // as the sidecar would say
            own.report.reason = own.text.size() > own.goes_on ? shortfall_too_short : shortfall_none;
        } else if (own.continues && own.text.size() - own.goes_on < own.text.size()/continued_part) {
            own.report.reason = shortfall_not_looked_up;
        } else {
            const bool direct = has_places(slot, own.text);
            if (!direct) {
                pinned_ = std::exchange(asked_for_pinned_, true) ? pinned_ : pinned_memory(slot.ctx_tgt);
                links_.restorer->read_into(pinned_); // it is another one after a pause
            }
            links_.restorer->begin(slot.id, own.text, own.goes_on, own.have, links_.saver->fingerprints(slot.id, own.text), direct);
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
        slot_cells cells(slot, own.text, own.brought);
        const uint32_t start = links_.restorer->start(slot.id);
        if (start < own.goes_on && own.brought == 0) {
            leave(slot, start); // what comes takes the place of these, too
        }
        std::vector<fingerprint> fingerprints;
        const bool over = links_.restorer->step(slot.id, cells, until, own.report, fingerprints);
        own.brought += cells.rows();
        if (!over) {
            return false;
        }
        if (own.brought > 0 && has_images(own.text, own.text.size()) && !has_all_rows(slot)) {
            throw std::runtime_error("rows of an image are not where they belong");
        }
        links_.saver->restored(slot.id, own.text, std::move(fingerprints));
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

    void wake() {
        server_task task(SERVER_TASK_TYPE_NEXT_RESPONSE);
        task.id = queue_.get_new_id();
        queue_.post(std::move(task));
    }

    server_queue & queue_;
    std::string given_; // by the variable
    std::string path_;
    used_files loaded_; // before they were loaded
    std::vector<common_adapter_lora_info> adapters_; // with the scales that are in the name of what is stored
    own_cache own_cache_;
    std::chrono::nanoseconds first_part_ {}; // a request is computed for so long before its first part is stored
    std::shared_ptr<block_memory> pinned_;
    bool asked_for_pinned_ = false;
    size_t turn_ = 0;
};

} // namespace kvt
