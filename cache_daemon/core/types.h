#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "common/module_identity.h"

// The words of the daemon's core. Enumerators carry the numbers of
// promptcache.v1 and promptcache.node.v1, so that the services cast.
namespace promptcache::daemon {

// There is one device tier for each device of the node, and one host tier.
enum class Tier : uint32_t { kNone = 0, kDevice = 1, kHost = 2 };

enum class Outcome : uint32_t {
  kHit = 1,
  kReserved = 2,
  kPending = 3,
  kMiss = 4,
};

enum class MissReason : uint32_t {
  kNone = 0,
  kNeverSeen = 1,
  kEvicted = 2,
  kExpired = 3,
  kIdentityDiffers = 4,
  kNotYetCommitted = 5,
  kNoMemory = 6,
  kNotResident = 7,
  kCorrupt = 8,
  kOnOtherDevice = 9,
};
inline constexpr size_t kNumMissReasons = 10;

enum class ModuleState : uint32_t {
  kNone = 0,
  kReserved = 1,
  kCommitted = 2,
  kMoving = 3,
  kEvicted = 4,  // hidden; waits for its last lease
  kQuarantined = 5,
};
inline constexpr size_t kNumModuleStates = 6;

enum class EvictReason : uint32_t {
  kNone = 0,
  kCapacity = 1,
  kExpired = 2,
  kRequested = 3,
  kCorrupt = 4,
};
inline constexpr size_t kNumEvictReasons = 5;

// 0 is nobody's.
enum class SessionId : uint64_t {};
enum class LeaseId : uint64_t {};
enum class ReservationId : uint64_t {};
enum class ProcessId : uint64_t {};  // given out by ProcessWatcher

// Consecutive pages of a segment; first_page counts pages of the layout that
// the segment is carved for.
struct PageRun {
  uint32_t segment = 0;
  uint32_t first_page = 0;
  uint32_t num_pages = 0;
  friend bool operator==(const PageRun&, const PageRun&) = default;
};
using PageRuns = absl::InlinedVector<PageRun, 1>;

// What the daemon uses of a KV layout.
struct PageShape {
  uint64_t page_bytes = 0;
  uint32_t page_tokens = 0;
  // Equal parts of a page, one after the other: what can be read on its own.
  uint32_t num_layers = 1;
  uint64_t PagesFor(uint64_t num_tokens) const {
    return (num_tokens + page_tokens - 1) / page_tokens;
  }
  friend bool operator==(const PageShape&, const PageShape&) = default;
};

// promptcache.v1.CachePolicy.
struct CachePolicy {
  std::optional<absl::Duration> ttl;  // unset: the daemon's default
  bool absolute_ttl = false;          // from the commit, not the last use
  bool pin = false;
  friend bool operator==(const CachePolicy&, const CachePolicy&) = default;
};

struct ModuleMetadata {
  std::string schema;
  std::string path;
  Digest text_sha256;
  Digest context_key;
  uint32_t num_tokens = 0;
  CachePolicy policy;
  uint64_t compute_us = 0;
};

// Where one copy of a module is.
struct Placement {
  Tier tier = Tier::kNone;
  uint32_t device = 0;  // of PagePool; 0 in the host tier
  ModuleState state = ModuleState::kNone;
  uint32_t num_leases = 0;
};

// promptcache.v1.Module. Of several copies it is the sum of leases and hits,
// the latest of use and end, and the best of states (resident before reserved,
// device before host).
struct ModuleInfo {
  ModuleKey key;
  ModuleMetadata metadata;
  std::string isolation_domain;
  uint64_t bytes = 0;  // of one copy
  ModuleState state = ModuleState::kNone;
  Tier tier = Tier::kNone;
  bool pinned = false;
  uint32_t num_leases = 0;
  absl::Time commit_time = absl::InfinitePast();
  absl::Time last_use_time = absl::InfinitePast();
  absl::Time expire_time = absl::InfiniteFuture();  // never
  uint64_t hits = 0;
  MissReason absence = MissReason::kNone;
  std::vector<Placement> placements;  // devices in their order, then the host
};

// Selects modules; what is set must match. Empty selects nothing unless `all`.
struct ModuleFilter {
  bool all = false;
  // Hexadecimal keys, or unambiguous prefixes of at least 8 digits.
  std::vector<std::string> keys;
  std::string schema;
  std::string path;  // with schema
};

// promptcache.v1.CacheEvent.
struct CacheEvent {
  enum class Kind : uint32_t {
    kCommitted = 1,
    kEvicted = 2,
    kMoved = 3,
    kQuarantined = 4,
    kReservationAborted = 5,
    kSessionOpened = 6,
    kSessionClosed = 7,
    kSchemaChanged = 8,  // emitted by the registry's owner
    kMissed = 9,
  };
  Kind kind = Kind::kCommitted;
  absl::Time time;
  std::optional<ModuleKey> key;
  std::string schema;
  std::string path;
  Tier tier = Tier::kNone;
  std::string device_uuid;  // of the device tier of a GPU
  EvictReason evict_reason = EvictReason::kNone;
  uint64_t bytes = 0;
  SessionId session{};
  std::string detail;
  uint64_t missed_events = 0;
};

struct Counted {
  uint64_t count = 0;   // lookups of hits and misses, modules of evictions
  uint64_t volume = 0;  // tokens of hits and misses, bytes of evictions
};

struct TierStats {
  Tier tier = Tier::kNone;
  std::string kind;
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t leased_bytes = 0;  // visible modules in use, lost readers' too
  uint64_t pinned_bytes = 0;
  uint64_t reserved_bytes = 0;  // reservations and destinations of moves
  // Of modules that nobody can be given any more and that somebody, lost or
  // not, may still be reading or writing.
  uint64_t quarantined_bytes = 0;
  uint64_t largest_free_run_bytes = 0;
  uint64_t num_modules = 0;  // committed or moving
  uint64_t num_segments = 0;
  uint64_t modules[kNumModuleStates] = {};
  Counted hits;  // where the module was when it was asked for
  Counted evictions[kNumEvictReasons];
  // Of the GPU whose memory it is, or that alone copies from it.
  std::string device_uuid;
  std::string device_name;
  std::vector<std::string> handle_kinds;
  bool mapped_read_only = true;
};

// node.v1.AcquirePurpose: what of an Acquire counts.
enum class AcquirePurpose : uint8_t {
  kRequest,  // hits and misses
  kProbe,    // hits; misses apart
  kAgain,    // nothing: it did the first time
  kKeep,     // nothing: no request asked
};

// node.v1.ReportUse.
struct RequestUse {
  uint64_t cached_tokens = 0;
  uint64_t created_tokens = 0;
  uint64_t fresh_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t recomputed_tokens = 0;
  uint64_t attention_needed_tokens = 0;
  uint64_t attention_read_tokens = 0;
};

// promptcache.v1.CacheStats, less what the registry and main know. Modules are
// counted once for each copy.
struct CacheStats {
  std::vector<TierStats> tiers;  // devices in their order, then the host
  uint64_t modules[kNumModuleStates] = {};
  uint64_t hit_lookups = 0;
  uint64_t miss_lookups = 0;
  uint64_t hit_tokens = 0;
  uint64_t miss_tokens = 0;
  Counted
      missed_probes;  // no misses: nobody asked to keep what they looked for
  Counted misses[kNumMissReasons];
  // Of kIdentityDiffers, by the first field that differs.
  Counted differing[kNumIdentityFields + 1];
  Counted evictions[kNumEvictReasons];
  uint64_t commits = 0;
  uint64_t aborted_reservations = 0;
  uint64_t promotions = 0;
  uint64_t promotions_on_hit = 0;  // of those: read while they arrived
  uint64_t demotions = 0;
  uint64_t checksum_mismatches = 0;
  uint64_t num_sessions = 0;
  uint64_t num_leases = 0;
  uint64_t num_reservations = 0;
  uint64_t request_cached_tokens = 0;
  uint64_t request_created_tokens = 0;
  uint64_t request_fresh_tokens = 0;
  uint64_t request_preemptions = 0;
  uint64_t request_recomputed_tokens = 0;
  uint64_t attention_needed_tokens = 0;
  uint64_t attention_read_tokens = 0;
  uint64_t pinned_bytes = 0;
  uint64_t pin_budget_bytes = 0;
  uint64_t pins_refused = 0;  // of policies, for want of budget
};

std::string_view MissReasonName(MissReason reason);
std::string_view ModuleStateName(ModuleState state);
std::string_view TierName(Tier tier);

}  // namespace promptcache::daemon
