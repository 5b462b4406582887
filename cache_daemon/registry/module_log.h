#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_daemon/registry/records.h"
#include "cache_daemon/registry/sqlite_db.h"
#include "common/mutex.h"

namespace promptcache::daemon {

// Writes what is known of modules to the registry's file, off the request
// path: calls queue, one thread writes batches in one transaction each.
// A later call for a key overrides an earlier one that is still queued, so the
// queue never holds more than one entry a module; beyond `max_queued` modules
// new ones are dropped and counted (they are only forgotten by a restart).
//
// Thread-safe.
class ModuleLog {
 public:
  struct Options {
    size_t max_batch = 256;
    size_t max_queued = 65536;
    // Rows kept; the oldest commits go first.
    uint64_t max_modules = 100000;
    // How long a change waits for others to share its transaction.
    absl::Duration flush_interval = absl::Milliseconds(50);
  };

  // The file must have the registry's tables.
  static absl::StatusOr<std::unique_ptr<ModuleLog>> Create(
      const Options& options, const std::string& path);
  // Writes what is queued.
  ~ModuleLog();
  ModuleLog(const ModuleLog&) = delete;
  ModuleLog& operator=(const ModuleLog&) = delete;

  // A module was committed.
  void Put(const ModuleRecord& module) ABSL_LOCKS_EXCLUDED(mu_);
  // An operator pinned or unpinned it. No effect on one that is not known.
  void SetPin(const ModuleKey& key, bool pin) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until everything queued before the call is on disk; the error of a
  // batch that could not be written.
  absl::Status Flush() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t num_dropped() const ABSL_LOCKS_EXCLUDED(mu_);

  static absl::StatusOr<std::vector<ModuleRecord>> Load(SqliteDb* db);

 private:
  enum class ChangeKind { kPut, kSetPin };
  struct Change {
    ChangeKind kind = ChangeKind::kPut;
    ModuleRecord module;  // of kSetPin only policy.pin
  };
  using Changes = absl::flat_hash_map<ModuleKey, Change>;

  ModuleLog(const Options& options, SqliteDb db, uint64_t num_modules);
  void Enqueue(const ModuleKey& key, Change change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  Changes TakeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Write(const Changes& batch);
  absl::Status WriteChanges(const Changes& batch, uint64_t* num_modules);
  absl::Status Trim(uint64_t* num_modules);

  // Const after construction.
  const Options options_;
  std::thread thread_;

  // Used by the thread alone.
  SqliteDb db_;
  uint64_t num_modules_;  // rows that are there

  mutable Mutex mu_;
  CondVar wake_;     // the thread: something to do
  CondVar written_;  // Flush: a batch is done
  Changes queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int num_flushing_ ABSL_GUARDED_BY(mu_) = 0;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t num_dropped_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::daemon
