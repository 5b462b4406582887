#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

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

// The object `result`, and the conditions in it, on standard output.
void PrintJson(const Conditions& conditions, nlohmann::json result);

}  // namespace promptcache::bench
