#include "tools/bench/conditions.h"

#include <sched.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace promptcache::bench {
namespace {

// The value of the first line of /proc/cpuinfo that begins so.
std::string CpuInfo(absl::string_view field) {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, field)) continue;
    const size_t colon = rest.find(": ");
    if (colon != absl::string_view::npos) {
      return std::string(rest.substr(colon + 2));
    }
  }
  return "";
}

std::string Vectors() {
  const std::string flags = absl::StrCat(" ", CpuInfo("flags"), " ");
  const auto has = [&flags](absl::string_view name) {
    return flags.find(absl::StrCat(" ", name, " ")) != std::string::npos;
  };
  if (has("amx_tile")) return "AMX";
  if (has("avx512f")) return "AVX-512";
  return has("avx2") ? "AVX2" : "";
}

uint32_t Cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0
             ? static_cast<uint32_t>(CPU_COUNT(&set))
             : 0;
}

std::string Command() {
  std::ifstream file("/proc/self/cmdline");
  std::string words((std::istreambuf_iterator<char>(file)), {});
  if (!words.empty()) words.pop_back();  // each ends with a zero byte
  return absl::StrReplaceAll(words, {{absl::string_view("\0", 1), " "}});
}

}  // namespace

Conditions ReadConditions(std::string held_against) {
  Conditions conditions{.processor = CpuInfo("model name"),
                        .cores = Cores(),
                        .vectors = Vectors(),
                        .command = Command(),
                        .held_against = std::move(held_against)};
  getloadavg(&conditions.load, 1);
  return conditions;
}

StolenTime::Ticks StolenTime::Read() const {
  std::ifstream stat(file_);
  std::string name;  // "cpu": all of them
  stat >> name;
  // user, nice, system, idle, iowait, irq, softirq, steal. Guests, which
  // follow, are in user already.
  std::array<uint64_t, 8> ticks{};
  for (uint64_t& value : ticks) stat >> value;
  return {.stolen = ticks.back(),
          .all = std::accumulate(ticks.begin(), ticks.end(), uint64_t{0})};
}

double StolenTime::Share() const {
  const Ticks end = Read();
  return end.all > begin_.all
             ? static_cast<double>(end.stolen - begin_.stolen) /
                   static_cast<double>(end.all - begin_.all)
             : 0;
}

std::string ToText(const Conditions& conditions) {
  return absl::StrFormat(
      "%s, %u cores%s%s, load before %.1f\n%s\nheld against: %s\n",
      conditions.processor, conditions.cores,
      conditions.vectors.empty() ? "" : ", ", conditions.vectors,
      conditions.load, conditions.command, conditions.held_against);
}

nlohmann::json ToJson(const Conditions& conditions) {
  return {{"processor", conditions.processor},
          {"cores", conditions.cores},
          {"vectors", conditions.vectors},
          {"load", conditions.load},
          {"command", conditions.command},
          {"held_against", conditions.held_against}};
}

std::string ToText(const std::vector<Bar>& bars) {
  std::string text;
  for (const Bar& bar : bars) {
    absl::StrAppendFormat(&text, "%s: %.4g, to be %s %.4g: %s\n", bar.name,
                          bar.value, bar.at_least ? ">=" : "<=", bar.limit,
                          bar.held() ? "held" : "not held");
  }
  return text;
}

nlohmann::json ToJson(const std::vector<Bar>& bars) {
  nlohmann::json json = nlohmann::json::array();
  for (const Bar& bar : bars) {
    json.push_back({{"name", bar.name},
                    {"value", bar.value},
                    {bar.at_least ? "at_least" : "at_most", bar.limit},
                    {"held", bar.held()}});
  }
  return json;
}

void PrintJson(const Conditions& conditions, nlohmann::json result) {
  result["conditions"] = ToJson(conditions);
  std::cout << result.dump(2) << "\n";
}

}  // namespace promptcache::bench
