// llama-server's own cache of prompts (--cache-ram) would hold what the sidecar stores a second time, in up to 8 GiB. So it
// is off while the sidecar tiers the model, as with --cache-ram 0, from the first answer that is stored on; a model that is
// refused or still checked keeps it, and one whose sidecar is gone has it back, empty. Whoever says how large it is has it in
// any case. Included by server-context.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace kvt {

class own_cache {
public:
    // In the main loop, between two tasks. `cache` and `params` are the server's.
    void turn(bool welcomed, std::unique_ptr<server_prompt_cache> & cache, common_params & params) {
        if (!asked_for_.has_value()) {
            asked_for_ = asked_for();
        }
        if (welcomed && cache != nullptr && !*asked_for_) {
            SRV_INF("%s", "kv tiering: the server's own cache of prompts is off; --cache-ram says how large it is\n");
            put_away_ = std::move(cache);
            put_away_->states.clear();
            ram_mib_ = std::exchange(params.cache_ram_mib, 0);
            idle_slots_ = std::exchange(params.cache_idle_slots, false); // else the server uses it without a look
        } else if (!welcomed && put_away_ != nullptr) {
            SRV_INF("%s", "kv tiering: the server's own cache of prompts is on until the sidecar answers again\n");
            cache = std::move(put_away_);
            params.cache_ram_mib = ram_mib_;
            params.cache_idle_slots = idle_slots_;
        }
    }

private:
    // By the variable or the option: its value may be the one that it has by itself.
    static bool asked_for() {
        if (std::getenv("LLAMA_ARG_CACHE_RAM") != nullptr) {
            return true;
        }
        std::ifstream words("/proc/self/cmdline");
        for (std::string word; std::getline(words, word, '\0');) {
            std::replace(word.begin(), word.end(), '_', '-'); // as the server reads its options
            if (word == "-cram" || word == "--cache-ram") {
                return true;
            }
        }
        return false;
    }

    std::optional<bool> asked_for_; // looked up once
    std::unique_ptr<server_prompt_cache> put_away_;
    int32_t ram_mib_ = 0;
    bool idle_slots_ = false;
};

} // namespace kvt
