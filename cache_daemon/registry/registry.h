#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_daemon/registry/module_log.h"
#include "cache_daemon/registry/records.h"
#include "cache_daemon/registry/sqlite_db.h"
#include "common/clock.h"
#include "common/file_lock.h"
#include "common/mutex.h"

namespace promptcache::daemon {

// What the daemon knows across restarts: schemas with their revisions and
// policies, and the modules that were ever committed. One SQLite file in WAL
// mode; a call that returned OK survives a crash of the process and of the
// machine (modules: after Flush, or within Options::flush_interval).
//
// Invariants: a revision's text never changes; revisions of a name count up
// from 1 and are never used again, deleted schemas included, so that a worker
// may cache what it compiled by (name, revision).
//
// Thread-safe. Schema calls run SQLite under one lock (a read 10 µs, a write
// one fsync); module calls only queue.
// It never looks into a schema's text.
class Registry {
 public:
  struct Options {
    std::string path;
    size_t max_schema_bytes = size_t{4} << 20;
    size_t max_name_bytes = 128;
    // Names of paths and policies together stay within sane bounds.
    size_t max_module_policies = 2000;
    ModuleLog::Options module_log;
    absl::Status Validate() const;
  };
  struct PutSchemaArgs {
    std::string name;
    std::string text;
    // Unset: a schema that exists keeps its own.
    std::optional<PolicyRecord> policy;
    // Empty: likewise. Else replaces all of them.
    std::map<std::string, PolicyRecord> module_policies;
  };
  struct PutSchemaResult {
    SchemaRecord schema;
    bool created = false;  // a revision was made
    bool changed = false;  // a revision was made, or policies differ now
  };
  struct SchemaPage {
    std::vector<SchemaRecord> schemas;  // without text, by name
    std::string next_page_token;        // empty: the last page
  };

  // Creates the file and its folder when missing. DataLoss for a damaged file,
  // FailedPrecondition for one that a newer version or another program wrote;
  // both name the file and say what to do; FailedPrecondition too, with its
  // process, when another registry has the file (a lock on "<path>.lock": two
  // would give the same revisions twice, and forget each other's modules).
  // `clock` must outlive the registry.
  static absl::StatusOr<std::unique_ptr<Registry>> Open(const Options& options,
                                                        const Clock* clock);
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // The current revision's text again: nothing new. InvalidArgument for a name
  // or text beyond the limits.
  absl::StatusOr<PutSchemaResult> PutSchema(const PutSchemaArgs& args)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Revision 0: the current one. NotFound for an unknown name or revision.
  absl::StatusOr<SchemaRecord> GetSchema(const std::string& name,
                                         uint64_t revision) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Tokens are those of an earlier page; a page may be asked for again, and
  // schemas put or deleted in between neither repeat nor hide others.
  absl::StatusOr<SchemaPage> ListSchemas(size_t page_size,
                                         const std::string& page_token) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // With all its revisions. NotFound when there is none.
  absl::Status DeleteSchema(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<uint64_t> CountSchemas() const ABSL_LOCKS_EXCLUDED(mu_);

  // Written asynchronously, in batches: never waits for the disk.
  ModuleLog& modules() { return *modules_; }
  // All modules on disk, by key: for the start of the daemon.
  absl::StatusOr<std::vector<ModuleRecord>> LoadModules() const
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Registry(const Options& options, const Clock* clock, FileLock lock,
           SqliteDb db);

  absl::StatusOr<SchemaRecord> Get(const std::string& name,
                                   uint64_t revision) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ReadPolicies(SchemaRecord* schema) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status WritePolicies(const PutSchemaArgs& args)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AddRevision(const PutSchemaArgs& args)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Const after construction.
  const Options options_;
  const Clock* const clock_;
  const FileLock lock_;
  std::unique_ptr<ModuleLog> modules_;

  mutable Mutex mu_;
  mutable SqliteDb db_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::daemon
