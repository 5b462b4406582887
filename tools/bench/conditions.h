#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
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
