#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace promptcache {

// What this process can still take before somebody is killed for it: the
// system's MemAvailable, or less where a memory cgroup that it is in, v1 or v2,
// or one above that, has less left (its limit minus its use; file pages that
// the kernel drops first do not count as use). UINT64_MAX where nothing says.
// `root`: where /proc and /sys are looked for.
uint64_t AvailableMemoryBytes(const std::string& root = "");

// 2 MiB pages that are reserved and free, which MemAvailable leaves out.
uint64_t FreeHugePageBytes(const std::string& root = "");

// ResourceExhausted, "WHAT: 900 GiB asked, 21.2 GiB available", when `asked`
// is more than `available`.
absl::Status CheckMemory(const std::string& what, uint64_t asked_bytes,
                         uint64_t available_bytes);

}  // namespace promptcache
