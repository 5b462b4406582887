#include "common/available_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/byte_size.h"

namespace promptcache {
namespace {

// The number behind `name` in lines of "NAME NUMBER ...".
std::optional<uint64_t> FindNumber(const std::string& path,
                                   const std::string& name) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const std::vector<std::string> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t number = 0;
    if (words.size() >= 2 && words[0] == name &&
        absl::SimpleAtoi(words[1], &number)) {
      return number;
    }
  }
  return std::nullopt;
}

// Nothing: no such file, or "max".
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  uint64_t number = 0;
  if (in >> word && absl::SimpleAtoi(word, &number)) return number;
  return std::nullopt;
}

// The names that the two versions have for the same things.
struct CgroupFiles {
  const char* limit;
  const char* use;
  const char* inactive_file;
  const char* active_file;
};
constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file", "total_active_file"};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "inactive_file",
                             "active_file"};

uint64_t LeftIn(const std::string& folder, const CgroupFiles& files) {
  const auto limit = ReadNumber(absl::StrCat(folder, "/", files.limit));
  const auto use = ReadNumber(absl::StrCat(folder, "/", files.use));
  if (!limit.has_value() || !use.has_value()) return UINT64_MAX;
  const std::string stat = folder + "/memory.stat";
  const uint64_t droppable = FindNumber(stat, files.inactive_file).value_or(0) +
                             FindNumber(stat, files.active_file).value_or(0);
  const uint64_t held = *use - std::min(*use, droppable);
  return *limit - std::min(*limit, held);
}

// Of the group at `path` below `mount` and of all above it. A container may see
// its own group as the mount's root, and be told a path that is not there.
uint64_t LeftUpwards(const std::string& mount, std::string path,
                     const CgroupFiles& files) {
  uint64_t left = UINT64_MAX;
  while (true) {
    left = std::min(left, LeftIn(mount + path, files));
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return left;
    path.resize(slash);
  }
}

uint64_t LeftInCgroups(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  uint64_t left = UINT64_MAX;
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    // "4:memory:/path", and "0::/path" of version 2.
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || absl::StrContains(parts[2], "..")) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0" && parts[1].empty()) {
      // Beside version 1 it has a folder of its own.
      for (const char* mount : {"", "/unified"}) {
        left = std::min(left, LeftUpwards(mounts + mount, parts[2], kV2));
      }
    } else if (std::ranges::find(controllers, "memory") != controllers.end()) {
      left = std::min(left, LeftUpwards(mounts + "/memory", parts[2], kV1));
    }
  }
  return left;
}

}  // namespace

uint64_t AvailableMemoryBytes(const std::string& root) {
  const auto kib = FindNumber(root + "/proc/meminfo", "MemAvailable:");
  const uint64_t machine = kib.has_value() ? *kib * 1024 : UINT64_MAX;
  return std::min(machine, LeftInCgroups(root));
}

uint64_t FreeHugePageBytes(const std::string& root) {
  const std::string folder =
      root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const uint64_t free = ReadNumber(folder + "free_hugepages").value_or(0);
  const uint64_t promised = ReadNumber(folder + "resv_hugepages").value_or(0);
  return (free - std::min(free, promised)) << 21;
}

absl::Status CheckMemory(const std::string& what, uint64_t asked_bytes,
                         uint64_t available_bytes) {
  if (asked_bytes <= available_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", RoundedByteSize(asked_bytes), " asked, ",
                   RoundedByteSize(available_bytes), " available"));
}

}  // namespace promptcache
