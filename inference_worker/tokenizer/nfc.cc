#include "inference_worker/tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "glog/logging.h"

namespace promptcache::worker {
namespace {

constexpr auto kOptions =
    static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
// Decompositions are at most four long.
constexpr utf8proc_ssize_t kMaxDecomposed = 8;

utf8proc_propval_t CombiningClass(int32_t c) {
  return utf8proc_get_property(c)->combining_class;
}

// The canonical decomposition, marks not yet in order.
std::vector<int32_t> Decompose(std::string_view text) {
  std::vector<int32_t> out;
  out.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto num_bytes = static_cast<utf8proc_ssize_t>(text.size());
  int boundary = 0;
  for (utf8proc_ssize_t i = 0; i < num_bytes;) {
    int32_t c = 0;
    const utf8proc_ssize_t step =
        utf8proc_iterate(bytes + i, num_bytes - i, &c);
    CHECK_GT(step, 0) << "not valid UTF-8";
    i += step;
    int32_t parts[kMaxDecomposed];
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(c, parts, kMaxDecomposed, kOptions, &boundary);
    CHECK(count >= 0 && count <= kMaxDecomposed) << "U+" << std::hex << c;
    out.insert(out.end(), parts, parts + count);
  }
  return out;
}

// utf8proc's own sort is quadratic in a run of marks.
void OrderMarks(std::vector<int32_t>* text) {
  std::vector<std::tuple<int32_t, std::ptrdiff_t, int32_t>> marks;
  for (auto begin = text->begin(); begin != text->end();) {
    if (CombiningClass(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(
        begin, text->end(), [](int32_t c) { return CombiningClass(c) == 0; });
    // std::stable_sort by class, which clang refuses in libstdc++ 12 (it uses
    // the deprecated get_temporary_buffer): ties keep their order by index.
    marks.clear();
    for (auto mark = begin; mark != end; ++mark) {
      marks.emplace_back(int32_t{CombiningClass(*mark)}, mark - begin, *mark);
    }
    std::sort(marks.begin(), marks.end());
    for (const auto& mark : marks) *begin++ = std::get<2>(mark);
  }
}

}  // namespace

std::string_view ToNfc(std::string_view text, std::string* buffer) {
  const auto is_ascii = [](char c) { return static_cast<uint8_t>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return text;
  std::vector<int32_t> points = Decompose(text);
  OrderMarks(&points);
  const utf8proc_ssize_t count = utf8proc_normalize_utf32(
      points.data(), static_cast<utf8proc_ssize_t>(points.size()), kOptions);
  CHECK_GE(count, 0) << "composing: " << utf8proc_errmsg(count);
  buffer->clear();
  buffer->reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t size =
        utf8proc_encode_char(points[static_cast<size_t>(i)], bytes);
    buffer->append(reinterpret_cast<const char*>(bytes),
                   static_cast<size_t>(size));
  }
  return *buffer;
}

}  // namespace promptcache::worker
