#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace promptcache::bench {

// What a figure was measured on and with, and what it is held against.
struct Conditions {
  std::string processor;  // as /proc/cpuinfo names it
  uint32_t cores = 0;     // that this process may use
  std::string vectors;    // the widest of AVX2, AVX-512 and AMX; may be empty
  double load = 0;        // of the last minute: other work, when read first
  std::string command;
  std::string held_against;
};

// Of this process, now.
Conditions ReadConditions(std::string held_against);

// What a hypervisor takes of the processors' time from here on, on which no
// program has any influence: waits of its length are no fault of what is
// measured.
class StolenTime {
 public:
  // Reads a file in the form of /proc/stat, now and at each Share.
  explicit StolenTime(std::string file = "/proc/stat")
      : file_(std::move(file)), begin_(Read()) {}
  // Of all time since, 0 to 1. 0 where the file does not tell.
  double Share() const;

 private:
  struct Ticks {
    uint64_t stolen = 0;
    uint64_t all = 0;
  };
  Ticks Read() const;

  std::string file_;
  Ticks begin_;
};

// Lines for above a table.
std::string ToText(const Conditions& conditions);
nlohmann::json ToJson(const Conditions& conditions);

// A number that a figure is held against.
struct Bar {
  std::string name;
  double value = 0;
  double limit = 0;
  bool at_least = false;  // the limit is the lowest, else the highest

  bool held() const { return at_least ? value >= limit : value <= limit; }
};

// One line each, that says held or not held.
std::string ToText(const std::vector<Bar>& bars);
nlohmann::json ToJson(const std::vector<Bar>& bars);

// The object `result`, and the conditions in it, on standard output.
void PrintJson(const Conditions& conditions, nlohmann::json result);

}  // namespace promptcache::bench
