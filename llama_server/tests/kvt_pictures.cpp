// Lists of tokens with images, and SHA-256.
//   kvt_pictures sha256             of standard input, in hex, and whether it is read back
//   kvt_pictures list PART...       PART: a number of tokens of text, or ROWSxPOSITIONS of an image, with M-RoPE if these differ
// Says of the list, for each number of its rows: after how many of them one goes on, what may be asked for, the position; then the
// extras, and what is stored for each token.
#include "../src/kvt_images.h"
#include "../src/kvt_sha256.h"

#include <cstdint>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

kvt::image made(uint32_t rows, uint32_t positions, uint32_t number) {
    kvt::image one;
    const std::string name = std::to_string(rows) + " " + std::to_string(positions) + " " + std::to_string(number);
    one.digest = kvt::sha256_of(name.data(), name.size());
    one.rows = rows;
    one.positions = positions;
    one.columns = rows == positions ? 0 : positions;
    return one;
}

int list(int count, char ** words) {
    std::vector<int32_t> tokens;
    uint32_t images = 0;
    for (int i = 0; i < count; ++i) {
        const std::string word = words[i];
        const size_t by = word.find('x');
        const auto rows = (size_t) std::stoul(word);
        if (by == std::string::npos) {
            tokens.insert(tokens.end(), rows, 5);
            continue;
        }
        const auto one = made((uint32_t) rows, (uint32_t) std::stoul(word.substr(by + 1)), ++images);
        const int32_t first = kvt::number_of(one);
        if (first >= -1 || kvt::number_of(one) != first || kvt::known_number(one.digest) != first) {
            std::cout << "no number" << std::endl;
            return 1;
        }
        tokens.push_back(first);
        tokens.insert(tokens.end(), rows - 1, kvt::number_after(first));
    }
    const auto all = (uint32_t) tokens.size();
    for (uint32_t n = 0; n <= all; ++n) {
        std::cout << n << ": " << kvt::resumable(tokens, n) << " " << kvt::askable(tokens, n) << " " << kvt::position_at(tokens, n) << "\n";
    }
    for (const auto & one : kvt::extras_of(tokens, all)) {
        std::cout << "extra at " << one.position << " " << kvt::hex_of(one.digest) << "\n";
    }
    std::cout << "places";
    for (const auto & one : kvt::places_of(tokens, 0, all)) {
        std::cout << " " << one.t << "," << one.y << "," << one.x;
    }
    std::cout << "\nstored";
    for (const int32_t token : tokens) {
        std::cout << " " << kvt::as_stored(token);
    }
    std::cout << "\nup to";
    for (int32_t position = 0; position <= kvt::position_at(tokens, all); ++position) {
        std::cout << " " << kvt::tokens_up_to(tokens, position);
    }
    std::cout << std::endl;
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc > 1 && std::string(argv[1]) == "list") {
        return list(argc - 2, argv + 2);
    }
    const std::string data { std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>() };
    const auto digest = kvt::sha256_of(data.data(), data.size());
    kvt::sha256 back {};
    const std::string hex = kvt::hex_of(digest);
    const bool whole = kvt::from_hex(hex, back) && back == digest && !kvt::from_hex(hex.substr(1), back) && !kvt::from_hex("G" + hex.substr(1), back);
    std::cout << hex << (whole ? "" : " broken") << std::endl;
    return 0;
}
