// What llama.cpp calls an image. Its own name is 64 bits that anybody can find a second file for, and where it joins two images to
// one, that of the first alone; ours is the SHA-256 of the file, and of the files that follow it at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct mtmd_bitmap;
struct mtmd_input_chunk;
namespace mtmd {
struct bitmaps;
}

namespace kvt {

// Names the images of a prompt by the content of their files, if there is a sidecar. In a thread of a connection. `marker` stands in
// the prompt for each.
void name_images(mtmd::bitmaps & images, const std::vector<std::vector<unsigned char>> & files, const std::string & prompt, const char * marker);

// Whether prompts are tiered behind images; at first they are not.
void take_images(bool are_taken);

// The number of the first row of an image (kvt_images.h); 0 for one whose content is not known by its name, or whose positions do
// not follow from where it begins, and for a sound.
int32_t number_of_chunk(const mtmd_input_chunk * chunk);

} // namespace kvt
