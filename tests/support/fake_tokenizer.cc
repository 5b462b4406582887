#include "tests/support/fake_tokenizer.h"

#include <array>

namespace promptcache {
namespace {

constexpr std::array<std::string_view, 3> kControl = {"<|bos|>", "<|im_start|>",
                                                      "<|im_end|>"};
constexpr int32_t kFirstByte = 3;
constexpr int32_t kFirstPair = kFirstByte + 256;

bool IsLower(char c) { return c >= 'a' && c <= 'z'; }

}  // namespace

FakeTokenizer::FakeTokenizer(const Options& options)
    : bos_id_(options.adds_bos ? 0 : -1),
      stop_ids_({2}),
      digest_(Sha256Of("fake tokenizer")) {}

std::vector<int32_t> FakeTokenizer::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ' ' && i + 1 < text.size() && IsLower(text[i + 1])) {
      ids.push_back(kFirstPair + (text[++i] - 'a'));
    } else {
      ids.push_back(kFirstByte + static_cast<unsigned char>(text[i]));
    }
  }
  return ids;
}

std::string FakeTokenizer::Decode(int32_t id) const {
  if (id < kFirstByte || id >= vocab_size()) return "";
  if (id < kFirstPair)
    return std::string(1, static_cast<char>(id - kFirstByte));
  return {' ', static_cast<char>('a' + id - kFirstPair)};
}

int32_t FakeTokenizer::ControlToken(std::string_view text) const {
  for (size_t i = 0; i < kControl.size(); ++i) {
    if (kControl[i] == text) return static_cast<int32_t>(i);
  }
  return -1;
}

int32_t FakeTokenizer::vocab_size() const { return kFirstPair + 26; }

std::string FakeTokenizer::Text(const std::vector<int32_t>& ids) const {
  std::string text;
  for (const int32_t id : ids) {
    text += id >= 0 && id < kFirstByte
                ? std::string(kControl[static_cast<size_t>(id)])
                : Decode(id);
  }
  return text;
}

}  // namespace promptcache
