#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache_daemon/core/types.h"

// What sessions, operators and movers ask of ModuleCache, and its answers.
namespace promptcache::daemon {

// One module asked for.
struct AcquireKey {
  ModuleKey key;
  uint32_t num_tokens = 0;
  std::string_view path;
  IdentityParts parts{};  // all zero: not told
};

struct AcquireRequest {
  uint64_t request_id = 0;
  std::span<const AcquireKey> keys;
  bool reserve_missing = false;
  bool want_page_sums = false;
  AcquirePurpose purpose = AcquirePurpose::kRequest;
  // What another session is encoding is a miss, kNotYetCommitted: the asker
  // does not wait for it.
  bool no_wait = false;
  std::string_view schema;
  std::string_view isolation_domain = "default";
};

struct AcquiredModule {
  Outcome outcome = Outcome::kMiss;
  MissReason miss_reason = MissReason::kNone;
  IdentityField differing_field = IdentityField::kNone;
  Tier tier = Tier::kNone;
  Tier found_in = Tier::kNone;  // of a hit: where it was when it was asked for
  uint64_t generation = 0;
  // Of a hit that is being copied to the device; 0: it is whole.
  uint32_t progress_word = 0;
  ReservationId reservation{};
  PageRuns runs;
  std::vector<uint64_t> page_sums;  // of a hit, when asked for
};

struct AcquireResult {
  LeaseId lease{};
  std::vector<AcquiredModule> modules;  // parallel to the keys
};

// What became of a PENDING key.
struct PendingResolved {
  uint64_t request_id = 0;
  uint32_t index = 0;
  LeaseId lease{};  // of its own
  AcquiredModule module;
};

struct CommitModule {
  ReservationId reservation{};
  std::vector<uint64_t> page_sums;  // in run order
  ModuleMetadata metadata;
};

struct CommitResult {
  bool committed = false;
  bool pinned = false;
  bool pin_refused = false;  // over the pin budget
  ModuleKey key;
  std::string isolation_domain;
};

// A decision to copy, and the pages that are held for it.
struct MoveTicket {
  uint64_t id = 0;
  ModuleKey key;
  Tier from = Tier::kNone;
  Tier to = Tier::kNone;
  uint32_t device = 0;  // whose tier it leaves or enters
  uint64_t page_bytes = 0;
  PageRuns source;
  PageRuns destination;
  std::vector<uint64_t> page_sums;  // what the copies must sum up to
};

// The same for a promotion that readers wait for, layer by layer.
struct ArrivalTicket {
  uint64_t id = 0;
  PageShape shape;
  PageRuns source;
  PageRuns destination;
  uint32_t progress_word = 0;
  uint64_t generation = 0;  // of the word's values
};

struct ListArgs {
  std::optional<ModuleFilter> filter;  // unset: all
  bool include_absent = false;
  size_t page_size = 100;
  std::optional<ModuleKey> after;  // the last key of the page before
};

struct ListResult {
  std::vector<ModuleInfo> modules;  // in the order of keys
  bool more = false;
};

struct EvictResult {
  uint64_t num_evicted = 0;
  uint64_t bytes = 0;
  uint64_t num_deferred = 0;  // in use: hidden now, freed by the last user
  std::vector<ModuleKey> keys;
};

// Of one key. Absent: not there, or a reservation.
enum class PinOutcome { kAbsent, kChanged, kUnchanged, kRefused };

struct PinResult {
  uint64_t num_changed = 0;
  uint64_t pinned_bytes = 0;
  uint64_t pin_budget_bytes = 0;
  uint64_t num_unchanged = 0;   // as asked already
  uint64_t num_refused = 0;     // over the pin budget
  std::vector<ModuleKey> keys;  // changed
};

struct PolicyChange {
  ModuleKey key;
  CachePolicy policy;
  // Only what makes the module stay longer. The longer ttl, sliding unless both
  // are absolute; a pin that it has stays.
  bool only_longer = false;
};

// A schema's policies: of the module with that path, else of all.
struct SchemaPolicies {
  CachePolicy policy;
  std::map<std::string, CachePolicy, std::less<>> by_path;
};

struct RefusedPin {
  ModuleKey key;
  std::string path;
};

struct PolicyResult {
  uint64_t num_changed = 0;
  std::vector<RefusedPin> pins_refused;  // over the pin budget
  std::vector<ModuleKey> pinned;         // newly
  std::vector<ModuleKey> unpinned;
};

}  // namespace promptcache::daemon
