// What llama-server does for its slots: looks up before a prompt, stores after an answer. Included by server-context.cpp
// alone, below server_slot; the calls are placed by ollama_tiering/patchset/llama_server. All of it runs in the main loop.
//
// A row is sound if it is what computing its tokens gives. After a context shift the rows behind it are not, though their
// tokens are known, nor are rows that came into a slot by another way. Only sound rows are stored.
#pragma once

#include "kvt_cache.h"
#include "kvt_client.h"
#include "kvt_describe.h"
#include "kvt_restore.h"
#include "kvt_saver.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvt {

// The tokens before the first image or sound: there, positions are numbers of tokens.
inline std::vector<int32_t> text_of(const server_tokens & all) {
    std::vector<int32_t> text;
    for (size_t i = 0; i < all.size() && all[i] != LLAMA_TOKEN_NULL; ++i) {
        text.push_back(all[i]);
    }
    return text;
}

inline uint32_t common_prefix(const std::vector<int32_t> & a, const std::vector<int32_t> & b) {
    const auto most = (std::ptrdiff_t) std::min(a.size(), b.size());
    return (uint32_t) (std::mismatch(a.begin(), a.begin() + most, b.begin()).first - a.begin());
}

// Rows out of slots. For one step: it remembers which cells they are in.
class slot_rows : public row_source {
public:
    void add(const server_slot & slot) { slots_[slot.id].slot = &slot; }

    bool read(int slot, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, char * out) override {
        const auto found = slots_.find(slot);
        if (found == slots_.end() || !prepare(found->second)) {
            return false;
        }
        const seen & one = found->second;
        const uint32_t end = first + rows;
        if (end > one.cells.size() || end > tokens.size() || !std::equal(tokens.begin(), tokens.begin() + end, one.tokens.begin())) {
            return false;
        }
        for (const auto & plane : one.planes) {
            read_rows(plane, one.cells.data() + first, rows, out);
            out += rows*plane.row_bytes;
        }
        return true;
    }

private:
    struct seen {
        const server_slot * slot = nullptr;
        bool looked = false;
        std::vector<int32_t> tokens;
        std::vector<uint32_t> cells;
        std::vector<plane> planes;
    };

    static bool prepare(seen & one) {
        if (!one.looked) {
            std::string why;
            one.looked = true;
            llama_synchronize(one.slot->ctx_tgt); // a device may still be computing them
            one.tokens = text_of(one.slot->prompt.tokens);
            one.cells  = cells_of(one.slot->ctx_tgt, one.slot->id, (uint32_t) one.tokens.size());
            one.planes = planes_of(one.slot->ctx_tgt, one.slot->id, why);
        }
        return !one.planes.empty() && !one.cells.empty();
    }

    std::map<int, seen> slots_;
};

// Rows into a slot, behind the first `have` that it keeps. Its other rows go with the first that come.
class slot_cells : public row_sink {
public:
    slot_cells(server_slot & slot, const std::vector<int32_t> & prompt, uint32_t have) : slot_(slot), prompt_(prompt), have_(have) {}

    bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) override {
        if (planes_.empty() && !prepare()) {
            return false;
        }
        const auto cells = take_cells(slot_.ctx_tgt, slot_.id, first, rows);
        if (cells.empty()) {
            return false;
        }
        for (const auto & plane : planes_) {
            write_rows(plane, cells.data(), rows, block + skip*plane.row_bytes);
            block += block_rows*plane.row_bytes;
        }
        for (uint32_t i = first; i < first + rows; ++i) {
            slot_.prompt.tokens.push_back(prompt_[i]);
        }
        return true;
    }

private:
    bool prepare() {
        std::string why;
        llama_synchronize(slot_.ctx_tgt);
        planes_ = planes_of(slot_.ctx_tgt, slot_.id, why);
        slot_.mem.seq_rm(slot_.id, (llama_pos) have_, -1);
        slot_.prompt.tokens.keep_first(have_);
        return !planes_.empty();
    }

    server_slot & slot_;
    const std::vector<int32_t> & prompt_;
    const uint32_t have_;
    std::vector<plane> planes_;
};

class tier {
public:
    // Off for good without the variable: then every call returns at once.
    explicit tier(server_queue & queue) : queue_(queue) {
        const char * path = std::getenv("OLLAMA_KV_TIER_ENGINE_SOCKET");
        path_ = path != nullptr ? path : "";
    }

    // Before the server looks how much of the prompt its slot holds.
    void before_prompt(server_slot & slot, const common_params & params) {
        if (path_.empty() || !connect(slot, params)) {
            return;
        }
        seat & own = seats_[slot.id];
        own.open = false;
        const server_task & task = *slot.task;
        const auto held   = text_of(slot.prompt.tokens);
        const auto prompt = text_of(task.tokens);
        const uint32_t have = std::min(common_prefix(held, prompt), (uint32_t) prompt.size());
        leave(slot, have);
        if (!task.need_logits() || !slot.lora.empty()) {
            own.sound.clear();
            return;
        }
        const uint32_t sound = common_prefix(own.sound, prompt);
        own.open   = true;
        own.limit  = sound >= have ? UINT32_MAX : sound;
        own.text   = (uint32_t) prompt.size();
        own.report = {};
        own.report.prompt_tokens = (uint32_t) task.tokens.size();
        own.report.memory_tokens = std::min(have, own.report.prompt_tokens - 1);
        if (task.params.n_cache_reuse > 0) { // it moves rows, too
            shifted(slot, have);
            own.report.reason = shortfall_not_looked_up;
        } else if (!exact_ && shift_waits(slot.ctx_tgt)) {
            own.limit = 0;
            own.report.reason = shortfall_not_looked_up;
        } else if (prompt.size() > have) {
            bring(slot, own, prompt, have);
        }
        own.prefilled = false;
        own.began = clock::now();
    }

    // Before the server's own cache of prompts takes the slot's rows away, and may give it others.
    void before_swap(const server_slot & slot) {
        if (saver_ != nullptr) {
            leave(slot, 0);
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
        own.sound = text_of(slot.prompt.tokens);
        own.sound.resize(std::min<size_t>(own.sound.size(), own.limit));
        prefilled(own);
        saver_->report(own.report);
        store(slot.id, own);
    }

    // Before rows behind the first `n_keep` are given other positions.
    void before_shift(std::vector<server_slot> & slots, server_slot & slot, int32_t n_keep) {
        if (saver_ == nullptr) {
            return;
        }
        seat & own = seats_[slot.id];
        if (own.open) {
            own.sound = text_of(slot.prompt.tokens);
            own.sound.resize(std::min<size_t>(own.sound.size(), own.limit));
            store(slot.id, own);
        }
        if (!exact_) { // all rows of the cache are rounded anew
            for (auto & other : slots) {
                shifted(other, 0);
            }
        }
        shifted(slot, (uint32_t) std::max(n_keep, 0));
    }

    // Once in each turn of the main loop.
    void step(std::vector<server_slot> & slots) {
        if (saver_ == nullptr) {
            return;
        }
        slot_rows rows;
        for (auto & slot : slots) {
            rows.add(slot);
            const auto found = seats_.find(slot.id);
            const bool waits = slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_PROCESSING_PROMPT;
            if (found != seats_.end() && found->second.open && !waits) {
                prefilled(found->second);
            }
        }
        saver_->step(rows, saving_step);
    }

private:
    using clock = std::chrono::steady_clock;

    struct seat { // what is known of a slot
        bool open = false;          // it has a request whose rows may be stored
        bool prefilled = false;
        uint32_t limit = 0;         // of the request's rows, those before it are sound
        uint32_t text = 0;          // tokens of the prompt, up to its first image
        std::vector<int32_t> sound; // tokens whose rows the slot held after its last request, as far as they are sound
        finished report;
        clock::time_point began;
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
            storing_ = std::make_unique<client>(path_, said_);
            exact_   = shifts_exactly(slot.ctx_tgt);
            saver_   = std::make_unique<saver>(*storing_, *look_up_, said_, [this] { wake(); });
            look_up_->wait_first(lookup_timeout);
        }
        return true;
    }

    void bring(server_slot & slot, seat & own, const std::vector<int32_t> & prompt, uint32_t have) {
        slot_cells cells(slot, prompt, have);
        try {
            restore(*look_up_, said_, prompt, have, cells, own.report);
        } catch (const std::exception & error) {
            SLT_WRN(slot, "kv tiering: %s\n", error.what());
            slot.prompt_clear(); // whatever was half done
            own.report.restored_tokens = 0;
            own.report.reason = shortfall_failed;
            return;
        }
        if (own.report.restored_tokens > 0) {
            SLT_INF(slot, "kv tiering: restored %u rows behind %u, %.1f MiB: look-up %.1f ms, reading %.1f ms, copying %.1f ms\n",
                    own.report.restored_tokens, have, (double) own.report.restored_bytes/1048576, own.report.lookup_seconds*1e3,
                    own.report.fetch_seconds*1e3, own.report.copy_seconds*1e3);
        }
        if (own.report.reason == shortfall_none && own.text < own.report.prompt_tokens) {
            own.report.reason = shortfall_not_text;
        }
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

    void store(int slot, const seat & own) {
        if (own.sound.size() > look_up_->greeting().min_tokens) {
            const uint32_t restored = own.report.restored_tokens;
            saver_->add(slot, own.sound, restored > 0 ? own.report.memory_tokens + restored : 0);
        }
    }

    static void prefilled(seat & own) {
        if (!own.prefilled) {
            own.report.prefill_seconds = std::chrono::duration<double>(clock::now() - own.began).count();
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
    bool exact_ = false;
    std::map<int, seat> seats_;
    std::unique_ptr<client> look_up_;
    std::unique_ptr<client> storing_;
    std::unique_ptr<saver> saver_; // last: it uses the clients
};

} // namespace kvt
