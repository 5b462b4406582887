#include "inference_worker/tokenizer/byte_level.h"

namespace promptcache::worker {
namespace {

bool SpellsItself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
}

}  // namespace

ByteLevelSpelling::ByteLevelSpelling() {
  bytes_.fill(-1);
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const size_t code_point =
        SpellsItself(byte) ? static_cast<size_t>(byte) : next++;
    bytes_[code_point] = static_cast<int16_t>(byte);
    std::string& spelling = spellings_[static_cast<size_t>(byte)];
    if (code_point < 0x80) {
      spelling = {static_cast<char>(code_point)};
    } else {
      spelling = {static_cast<char>(0xC0 | code_point >> 6),
                  static_cast<char>(0x80 | (code_point & 0x3F))};
    }
  }
}

std::optional<std::string> ByteLevelSpelling::Bytes(
    std::string_view spelled) const {
  std::string bytes;
  for (size_t i = 0; i < spelled.size(); ++i) {
    size_t code_point = static_cast<uint8_t>(spelled[i]);
    if (code_point >= 0x80) {  // two bytes, or nothing that spells a byte
      if (code_point < 0xC2 || code_point > 0xDF || i + 1 == spelled.size()) {
        return std::nullopt;
      }
      const auto second = static_cast<uint8_t>(spelled[++i]);
      if ((second & 0xC0) != 0x80) return std::nullopt;
      code_point = (code_point & 0x1F) << 6 | (second & 0x3F);
    }
    if (code_point >= kCodePoints || bytes_[code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(bytes_[code_point]));
  }
  return bytes;
}

}  // namespace promptcache::worker
