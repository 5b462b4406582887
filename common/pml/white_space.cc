#include "common/pml/white_space.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace promptcache::pml {
namespace {

std::string_view Indentation(std::string_view line) {
  size_t n = 0;
  while (n < line.size() && IsSpace(line[n])) ++n;
  return line.substr(0, n);
}

size_t CommonPrefix(std::string_view a, std::string_view b) {
  const size_t n = std::min(a.size(), b.size());
  return static_cast<size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<ptrdiff_t>(n), b.begin())
          .first -
      a.begin());
}

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  for (;;) {
    const size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return lines;
    text.remove_prefix(end + 1);
  }
}

// Takes the common indentation from the lines that begin in the run, from
// `first` on.
std::string Dedent(std::string_view text, size_t first) {
  const std::vector<std::string_view> lines = Lines(text);
  std::optional<std::string_view> common;
  for (size_t i = first; i < lines.size(); ++i) {
    if (IsAllSpace(lines[i])) continue;
    const std::string_view indentation = Indentation(lines[i]);
    common = common.has_value()
                 ? common->substr(0, CommonPrefix(*common, indentation))
                 : indentation;
  }
  const size_t cut = common.value_or("").size();
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i < first) {
      out += lines[i];
    } else if (!IsAllSpace(lines[i])) {
      out += lines[i].substr(cut);
    }
  }
  return out;
}

}  // namespace

bool IsAllSpace(std::string_view text) {
  return std::all_of(text.begin(), text.end(), IsSpace);
}

std::string StripLayout(std::string_view run, bool last) {
  if (run.find('\n') == std::string_view::npos) return std::string(run);
  if (IsAllSpace(run)) return "";
  const size_t lead = Indentation(run).size();
  const size_t cut = run.substr(0, lead).rfind('\n');
  const bool begins_line = cut != std::string_view::npos;
  if (begins_line) run.remove_prefix(cut + 1);
  size_t end = run.size();
  while (IsSpace(run[end - 1])) --end;
  const bool ends_line = run.substr(end).find('\n') != std::string_view::npos;
  if (ends_line) run = run.substr(0, end);
  std::string out = Dedent(run, begins_line ? 0 : 1);
  if (ends_line && !last) out += '\n';
  return out;
}

}  // namespace promptcache::pml
