#include "tools/cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace promptcache::cli {
namespace {

constexpr size_t kColumns = 79;

// Characters, not bytes: UTF-8 continuation bytes take no room.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool IsNumber(const std::string& cell) {
  return !cell.empty() && std::isdigit(static_cast<unsigned char>(cell[0]));
}

std::string Pad(const std::string& cell, size_t width, bool right) {
  const std::string space(width - Width(cell), ' ');
  return right ? space + cell : cell + space;
}

}  // namespace

bool StdoutIsTerminal() { return ::isatty(STDOUT_FILENO) == 1; }
bool StderrIsTerminal() { return ::isatty(STDERR_FILENO) == 1; }

std::string WithCommas(uint64_t n) {
  const std::string digits = absl::StrCat(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string HumanBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0 || value >= 100) {
    return absl::StrFormat("%.0f %s", value, kUnits[unit]);
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string HumanMs(double ms) {
  if (ms >= 1000) return absl::StrFormat("%.2f s", ms / 1000);
  if (ms >= 100) return absl::StrFormat("%.0f ms", ms);
  return absl::StrFormat("%.1f ms", ms);
}

std::string FormatTable(const std::vector<std::vector<std::string>>& rows,
                        const std::string& indent) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], Width(row[i]));
    }
  }
  std::string out;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line = indent;
    for (size_t i = 0; i < rows[r].size(); ++i) {
      // The head stands over its numbers.
      const bool right =
          IsNumber(rows[r][i]) || (r == 0 && rows.size() > 1 &&
                                   i < rows[1].size() && IsNumber(rows[1][i]));
      absl::StrAppend(&line, i == 0 ? "" : "  ",
                      Pad(rows[r][i], widths[i], right));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

std::string Wrap(const std::string& text, const std::string& indent) {
  std::string out;
  std::string line;
  size_t i = 0;
  while (i < text.size()) {
    const size_t end = std::min(text.find(' ', i), text.size());
    const std::string word = text.substr(i, end - i);
    if (!line.empty() &&
        Width(indent) + Width(line) + 1 + Width(word) > kColumns) {
      absl::StrAppend(&out, indent, line, "\n");
      line.clear();
    }
    if (!word.empty()) absl::StrAppend(&line, line.empty() ? "" : " ", word);
    i = end + 1;
  }
  if (!line.empty()) absl::StrAppend(&out, indent, line, "\n");
  return out;
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), on_(StderrIsTerminal()) {}

ProgressBar::~ProgressBar() {
  if (on_) std::cerr << "\r\x1b[K" << std::flush;
}

void ProgressBar::Update(double fraction, const std::string& detail) {
  if (!on_) return;
  constexpr int kCells = 24;
  std::string bar;
  if (fraction < 0) {
    constexpr char kTurning[] = {'-', '\\', '|', '/'};
    bar = std::string(1, kTurning[turns_++ % 4]);
  } else {
    const int full =
        static_cast<int>(std::clamp(fraction, 0.0, 1.0) * kCells + 0.5);
    bar = absl::StrFormat(
        "[%s%s] %3.0f%%", std::string(static_cast<size_t>(full), '#'),
        std::string(static_cast<size_t>(kCells - full), '.'), fraction * 100);
  }
  std::cerr << "\r\x1b[K" << label_ << " " << bar << " " << detail
            << std::flush;
}

}  // namespace promptcache::cli
