#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace promptcache::worker {

// What untrusted bytes reach first, each as one function that must return for
// any input: no crash, no hang, no read outside the bytes. Reads all that a
// reader offers of what it accepted. Used by the libFuzzer programs and, over
// the seeds, by a test.

// A model file in GGUF: structure, metadata, vocabulary, every weight.
void FuzzGguf(std::span<const std::byte> bytes);

// A Hugging Face folder in one text: config.json, model.safetensors,
// tokenizer.json and tokenizer_config.json, joined by kFolderSeparator; what is
// missing or empty is a file that is not there.
void FuzzHfFolder(std::span<const std::byte> bytes);
inline constexpr char kFolderSeparator[] = "\n%%%%\n";

// The same folder without its weights: its tokenizer, created and used.
void FuzzTokenizer(std::span<const std::byte> bytes);

// A schema and a prompt, joined by kFolderSeparator, compiled with a tokenizer
// of single bytes.
void FuzzPml(std::span<const std::byte> bytes);

// Inputs to begin with: valid files of our own writers.
std::vector<std::string> GgufSeeds();
std::vector<std::string> HfFolderSeeds();
std::vector<std::string> PmlSeeds();

}  // namespace promptcache::worker
