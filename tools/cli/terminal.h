#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace promptcache::cli {

bool StdoutIsTerminal();
bool StderrIsTerminal();

// "1,234,567".
std::string WithCommas(uint64_t n);
// "1.5 GiB", "640 KiB", "12 B".
std::string HumanBytes(uint64_t bytes);
// "2.31 s", "61.4 ms".
std::string HumanMs(double ms);

// Columns as wide as their widest cell; numbers (cells that begin with a
// digit) are set to the right. The first row is the head.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows,
                        const std::string& indent);

// Words wrapped at 79 columns, every line indented.
std::string Wrap(const std::string& text, const std::string& indent);

// One line on standard error that is drawn over; silent, but for nothing at
// all, when that is not a terminal. Thread-compatible.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  // Erases the line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // `fraction` 0..1, or negative for work of unknown length.
  void Update(double fraction, const std::string& detail);

 private:
  const std::string label_;
  const bool on_;
  unsigned turns_ = 0;
};

}  // namespace promptcache::cli
