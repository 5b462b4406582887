#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/kv_layout.h"
#include "common/module_identity.h"
#include "cuda/runtime/device.h"

namespace promptcache::worker {

enum class AcquireOutcome { kHit, kReserved, kPending, kMiss };
// promptcache.v1.MissReason, same numbers.
enum class CacheMissReason : uint32_t {
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

// node.v1.AcquirePurpose: what the daemon's statistics make of an Acquire.
enum class AcquirePurpose {
  kRequest,  // of a request: hits and misses
  kProbe,    // would keep nothing: what is missing is no miss
  kAgain,    // the same request, whose first Acquire was answered
  kKeep,     // of no request, or of one that has not chosen its plan
};

// One module asked for. The paths and parts serve reasons and lists only.
struct AcquireKey {
  ModuleKey key;
  uint32_t num_tokens = 0;
  std::string path;
  IdentityParts parts{};
};

// One module as the daemon answered: page addresses in this process.
struct AcquiredModule {
  AcquireOutcome outcome = AcquireOutcome::kMiss;
  CacheMissReason miss_reason = CacheMissReason::kNone;
  IdentityField differing_field = IdentityField::kNone;
  // Hit and reserved: one address per page. read_pages is the read-only
  // mapping; write_pages (reserved only) the writable alias.
  std::vector<const std::byte*> read_pages;
  std::vector<std::byte*> write_pages;
  // The pages are in host memory, in the host tier or because the device is the
  // CPU: a GPU copies them (from pinned memory) and reads the copy.
  bool on_host = true;
  // A hit that the daemon is copying to the GPU now: layers can be read as
  // CacheLease::Progress says.
  bool arriving = false;
  uint64_t generation = 0;
  uint64_t reservation_id = 0;
  std::vector<uint64_t> page_sums;  // of a hit, when asked for
  // Committed, but the daemon's pin budget had no room for the pin asked for.
  bool pin_refused = false;
};

// A policy for a module that the daemon has already.
struct PolicyChange {
  ModuleKey key;
  // CachePolicy; negative ttl: the daemon's default.
  absl::Duration ttl = absl::Seconds(-1);
  bool absolute_ttl = false;
  bool pin = false;
  // Only what makes the module stay longer (node.v1.PolicyChange).
  bool only_longer = false;
};

struct CommitModule {
  uint64_t reservation_id = 0;
  std::vector<uint64_t> page_sums;
  std::string schema;
  std::string path;
  Digest text_sha256;
  Digest context_key;
  uint32_t num_tokens = 0;
  uint64_t compute_us = 0;
  // CachePolicy; negative ttl: the daemon's default.
  absl::Duration ttl = absl::Seconds(-1);
  bool absolute_ttl = false;
  bool pin = false;
};

// How far an arriving module is.
struct ModuleProgress {
  uint32_t num_layers = UINT32_MAX;  // can be read
  // It goes on no more: CacheLease::Valid says whether its states are right.
  bool ended = true;
};

// A session's right to read. Move-only; releases in the destructor (without
// waiting for an answer). Must not outlive the CacheClient that granted it.
class CacheLease {
 public:
  virtual ~CacheLease() = default;
  // Parallel to the keys asked for.
  virtual const std::vector<AcquiredModule>& modules() const = 0;
  // Blocks until key `index` (kPending) is resolved or the deadline passes;
  // then modules()[index] holds the new outcome (kHit, kReserved or kMiss), or
  // still kPending after DeadlineExceeded. Unavailable when the daemon is gone.
  virtual absl::Status WaitPending(size_t index, absl::Time deadline) = 0;
  // Seals reservations of this lease; parallel bools: false when one was gone,
  // its pages must not be read any more. Committed ones are leased from then
  // on and their outcome stays kReserved.
  virtual absl::StatusOr<std::vector<bool>> Commit(
      const std::vector<CommitModule>& modules, absl::Time deadline) = 0;
  // Gives reservations back; not answered. The destructor does it for those
  // that were neither committed nor aborted.
  virtual void Abort(const std::vector<uint64_t>& reservation_ids) = 0;
  // True while every page of module `index` still carries its generation and
  // the session that granted it lives. Checked when views are built and after
  // each step that read them.
  virtual bool Valid(size_t index) const = 0;
  // Of module `index` when it is arriving: nothing that was computed from it
  // counts before this has ended and Valid is true after that. Ends with the
  // session, too.
  virtual ModuleProgress Progress(size_t) const { return {}; }
  virtual void ReportCorruption(size_t index) = 0;
};

struct RequestUse {
  // Zero for a request that failed.
  uint64_t cached_tokens = 0;
  uint64_t created_tokens = 0;
  uint64_t fresh_tokens = 0;
  // How often its private pages were taken for others', and the tokens that
  // were computed again for it.
  uint64_t preemptions = 0;
  uint64_t recomputed_tokens = 0;
  // Of all the worker's passes since the last such report: engine/backend.h,
  // AttentionReads.
  uint64_t attention_needed_tokens = 0;
  uint64_t attention_read_tokens = 0;
};

// The worker's connection to the daemon of its node: one session, re-attached
// in the background after any loss (jittered back-off, 50 ms to 2 s). Segments
// are mapped once per session. Opening a session tells the daemon that this
// process has dropped everything of its earlier ones, so it waits until the
// lost session's leases are gone: drop those that are not Valid. Thread-safe;
// Acquire may be called from many threads at once.
class CacheClient {
 public:
  struct Options {
    std::string socket_path;  // gRPC; the descriptor socket is "<path>.fd"
    std::string worker_id;
    std::string model;
    KvLayout layout;
    // Where this worker computes, which the daemon's device tier must be on
    // too; null: the CPU. Must outlive the client.
    gpu::Device* device = nullptr;
    absl::Duration acquire_timeout = absl::Seconds(1);
    // Modules may be given that are still arriving on the GPU: the caller waits
    // for their layers. False: it gets them when they are whole.
    bool reads_arriving = false;
    // A schema changed or was deleted (revision 0); called on a gRPC thread,
    // must not block. May be empty.
    std::function<void(const std::string& name, uint64_t revision)>
        on_schema_changed;
    // A session was opened: schemas may have changed while there was none.
    // Called on the client's own thread, must not block. May be empty.
    std::function<void()> on_attached;
  };
  struct AcquireArgs {
    std::vector<AcquireKey> keys;
    bool reserve_missing = true;
    bool want_page_sums = false;
    AcquirePurpose purpose = AcquirePurpose::kRequest;
    // Nothing is kPending: what others are encoding is a miss.
    bool no_wait = false;
    std::string schema;
    std::string isolation_domain = "default";
  };

  // Succeeds without a daemon, too: then it attaches when one comes.
  static absl::StatusOr<std::unique_ptr<CacheClient>> Create(
      const Options& options);
  virtual ~CacheClient() = default;

  virtual bool attached() const = 0;
  virtual absl::Status WaitAttached(absl::Time deadline) = 0;
  // Unavailable without a daemon, DeadlineExceeded after acquire_timeout.
  virtual absl::StatusOr<std::unique_ptr<CacheLease>> Acquire(
      const AcquireArgs& args) = 0;
  // What a request used that is over. Not answered.
  virtual void ReportUse(const RequestUse& use) = 0;
  // Replaces the policies of modules that are there already; a commit brings
  // its own. Keys that the daemon does not know are ignored. Parallel bools:
  // true when the pin budget had no room for the pin asked for; the rest of the
  // policy holds. Blocks and fails like Acquire.
  virtual absl::StatusOr<std::vector<bool>> SetPolicy(
      const std::vector<PolicyChange>& changes) = 0;
};

}  // namespace promptcache::worker
