// All that is between an engine and its sidecar: what it said of itself, connections, and who uses them.
#pragma once

#include "kvt_client.h"
#include "kvt_restore.h"
#include "kvt_saver.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace kvt {

struct links {
    hello said;
    bool exact = false; // a context shift leaves the bits of rows that it does not move
    std::unique_ptr<client> look_up;
    std::unique_ptr<client> waiting; // for files that have to be fetched first
    std::unique_ptr<client> storing;
    std::unique_ptr<kvt::restorer> restorer; // these two use the clients, and end before them
    std::unique_ptr<kvt::saver> saver;

    // False for a model that is not tiered, of which the sidecar is told only why. `wake` is the saver's.
    bool open(const std::string & path, const hello & description, bool shifts_exactly, std::function<void()> wake) {
        close();
        said    = description;
        exact   = shifts_exactly;
        look_up = std::make_unique<client>(path, said);
        if (!said.unsupported.empty()) {
            return false;
        }
        waiting  = std::make_unique<client>(path, said);
        storing  = std::make_unique<client>(path, said);
        restorer = std::make_unique<kvt::restorer>(*look_up, *waiting, said);
        saver    = std::make_unique<kvt::saver>(*storing, said, std::move(wake));
        return true;
    }

    links() = default;
    links(links &&) = delete;
    links & operator=(const links &) = delete;
    ~links() { close(); }

    void close() {
        saver.reset();
        restorer.reset();
        storing.reset();
        waiting.reset();
        look_up.reset();
    }
};

} // namespace kvt
