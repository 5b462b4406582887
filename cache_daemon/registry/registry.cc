#include "cache_daemon/registry/registry.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

// "pcRG": says whose file it is.
constexpr int64_t kApplicationId = 0x70635247;
// Raised with every change of the tables, together with a step that brings an
// older file up.
constexpr int64_t kDbVersion = 1;

constexpr char kTables[] = R"(
CREATE TABLE schemas(
  name BLOB PRIMARY KEY,
  -- The highest revision ever given; the row stays when the schema is deleted.
  last_revision INTEGER NOT NULL,
  deleted INTEGER NOT NULL DEFAULT 0,
  ttl_us INTEGER, absolute_ttl INTEGER NOT NULL DEFAULT 0,
  pin INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE schema_revisions(
  name BLOB NOT NULL, revision INTEGER NOT NULL,
  text BLOB NOT NULL, text_sha256 BLOB NOT NULL,
  create_time_us INTEGER NOT NULL,
  PRIMARY KEY(name, revision)
);
CREATE TABLE module_policies(
  name BLOB NOT NULL, path BLOB NOT NULL,
  ttl_us INTEGER, absolute_ttl INTEGER NOT NULL, pin INTEGER NOT NULL,
  PRIMARY KEY(name, path)
) WITHOUT ROWID;
CREATE TABLE modules(
  key BLOB PRIMARY KEY,
  schema BLOB NOT NULL, path BLOB NOT NULL, isolation_domain BLOB NOT NULL,
  num_tokens INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
  text_sha256 BLOB NOT NULL, context_key BLOB NOT NULL,
  identity_parts BLOB NOT NULL, compute_us INTEGER NOT NULL,
  commit_time_us INTEGER NOT NULL,
  ttl_us INTEGER, absolute_ttl INTEGER NOT NULL, pin INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX modules_by_commit ON modules(commit_time_us, key);
CREATE INDEX modules_by_text ON modules(text_sha256);
)";

std::string_view BytesOf(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()),
          digest.bytes.size()};
}

void BindPolicy(int index, const PolicyRecord& policy, SqliteStatement* s) {
  if (policy.ttl.has_value()) {
    s->Bind(index, absl::ToInt64Microseconds(*policy.ttl));
  } else {
    s->BindNull(index);
  }
  s->Bind(index + 1, int64_t{policy.absolute_ttl});
  s->Bind(index + 2, int64_t{policy.pin});
}

PolicyRecord ReadPolicy(int column, const SqliteStatement& s) {
  PolicyRecord policy;
  if (!s.IsNull(column)) policy.ttl = absl::Microseconds(s.Int(column));
  policy.absolute_ttl = s.Int(column + 1) != 0;
  policy.pin = s.Int(column + 2) != 0;
  return policy;
}

absl::Status MakeTables(SqliteDb* db) {
  PC_ASSIGN_OR_RETURN(SqliteTransaction transaction,
                      SqliteTransaction::Begin(db));
  PC_RETURN_IF_ERROR(db->Exec(kTables));
  PC_RETURN_IF_ERROR(
      db->Exec(absl::StrCat("PRAGMA application_id=", kApplicationId)));
  PC_RETURN_IF_ERROR(
      db->Exec(absl::StrCat("PRAGMA user_version=", kDbVersion)));
  return transaction.Commit();
}

absl::Status CheckOrMakeTables(const std::string& path, SqliteDb* db) {
  PC_RETURN_IF_ERROR(db->CheckIntegrity());
  PC_ASSIGN_OR_RETURN(const int64_t application,
                      db->QueryInt("PRAGMA application_id"));
  PC_ASSIGN_OR_RETURN(const int64_t version,
                      db->QueryInt("PRAGMA user_version"));
  PC_ASSIGN_OR_RETURN(const int64_t num_tables,
                      db->QueryInt("SELECT COUNT(*) FROM sqlite_master"));
  if (application == 0 && version == 0 && num_tables == 0) {
    return MakeTables(db);
  }
  if (application != kApplicationId) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is a database of another program, not a registry"));
  }
  if (version != kDbVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("registry ", path, " has version ", version,
                     ", this program knows version ", kDbVersion,
                     ": run the program that wrote it, or move the file away "
                     "to start with an empty registry"));
  }
  return absl::OkStatus();
}

// What an operator can do about it, once, where the path is known.
absl::Status Explain(const std::string& path, const absl::Status& status) {
  if (status.code() != absl::StatusCode::kDataLoss) return status;
  return absl::DataLossError(absl::StrCat(
      status.message(), "; the registry is damaged: restore ", path,
      " from a copy, or move it (with its -wal and -shm files) away to start "
      "with an empty registry"));
}

}  // namespace

absl::Status Registry::Options::Validate() const {
  if (path.empty()) {
    return absl::InvalidArgumentError("the registry's path is empty");
  }
  if (max_schema_bytes == 0 || max_name_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("registry limits must not be 0: max_schema_bytes ",
                     max_schema_bytes, ", max_name_bytes ", max_name_bytes));
  }
  if (module_log.max_batch == 0 || module_log.max_queued == 0) {
    return absl::InvalidArgumentError(
        "the module log's batch and queue must not be 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Registry>> Registry::Open(const Options& options,
                                                         const Clock* clock) {
  PC_RETURN_IF_ERROR(options.Validate());
  const std::filesystem::path folder =
      std::filesystem::path(options.path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::PermissionDeniedError(absl::StrCat(
        "registry folder ", folder.string(), ": ", error.message()));
  }
  PC_ASSIGN_OR_RETURN(
      FileLock lock,
      FileLock::Take(
          options.path + ".lock",
          {.who = "another daemon",
           .does = absl::StrCat("keeps its registry in ", options.path,
                                ": stop it, or choose another --db")}));
  absl::StatusOr<SqliteDb> db = SqliteDb::Open(options.path);
  if (!db.ok()) return Explain(options.path, db.status());
  if (const absl::Status made = CheckOrMakeTables(options.path, &*db);
      !made.ok()) {
    return Explain(options.path, made);
  }
  PC_RETURN_IF_ERROR(db->Exec("PRAGMA synchronous=FULL"));
  std::unique_ptr<Registry> registry(
      new Registry(options, clock, std::move(lock), *std::move(db)));
  PC_ASSIGN_OR_RETURN(registry->modules_,
                      ModuleLog::Create(options.module_log, options.path));
  return registry;
}

Registry::Registry(const Options& options, const Clock* clock, FileLock lock,
                   SqliteDb db)
    : options_(options),
      clock_(clock),
      lock_(std::move(lock)),
      db_(std::move(db)) {}

Registry::~Registry() = default;

absl::StatusOr<Registry::PutSchemaResult> Registry::PutSchema(
    const PutSchemaArgs& args) {
  if (args.name.empty() || args.name.size() > options_.max_name_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a schema's name has ", args.name.size(), " bytes, 1 to ",
                     options_.max_name_bytes, " are possible"));
  }
  if (args.text.size() > options_.max_schema_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("schema ", args.name, " has ", args.text.size(),
                     " bytes, the limit is ", options_.max_schema_bytes));
  }
  if (args.module_policies.size() > options_.max_module_policies) {
    return absl::InvalidArgumentError(absl::StrCat(
        "schema ", args.name, " has policies for ", args.module_policies.size(),
        " modules, the limit is ", options_.max_module_policies));
  }
  MutexLock lock(&mu_);
  PC_ASSIGN_OR_RETURN(SqliteTransaction transaction,
                      SqliteTransaction::Begin(&db_));
  const absl::StatusOr<SchemaRecord> before = Get(args.name, 0);
  if (!before.ok() && !absl::IsNotFound(before.status())) {
    return before.status();
  }
  PutSchemaResult result;
  result.created = !before.ok() || before->text != args.text;
  if (result.created) PC_RETURN_IF_ERROR(AddRevision(args));
  PC_RETURN_IF_ERROR(WritePolicies(args));
  PC_ASSIGN_OR_RETURN(result.schema, Get(args.name, 0));
  result.changed = result.created || before->policy != result.schema.policy ||
                   before->module_policies != result.schema.module_policies;
  PC_RETURN_IF_ERROR(transaction.Commit());
  return result;
}

absl::Status Registry::AddRevision(const PutSchemaArgs& args) {
  PC_ASSIGN_OR_RETURN(
      SqliteStatement schema,
      db_.Prepare("INSERT INTO schemas(name, last_revision) VALUES(?1, 1) "
                  "ON CONFLICT(name) DO UPDATE SET "
                  "last_revision=last_revision+1, deleted=0"));
  schema.Bind(1, args.name);
  PC_RETURN_IF_ERROR(schema.Run());
  PC_ASSIGN_OR_RETURN(
      SqliteStatement revision,
      db_.Prepare("INSERT INTO schema_revisions(name, revision, text, "
                  "text_sha256, create_time_us) SELECT name, last_revision, "
                  "?2, ?3, ?4 FROM schemas WHERE name=?1"));
  revision.Bind(1, args.name).Bind(2, args.text);
  revision.Bind(3, BytesOf(Sha256Of(args.text)));
  revision.Bind(4, absl::ToUnixMicros(clock_->Now()));
  return revision.Run();
}

absl::Status Registry::WritePolicies(const PutSchemaArgs& args) {
  if (args.policy.has_value()) {
    PC_ASSIGN_OR_RETURN(SqliteStatement update,
                        db_.Prepare("UPDATE schemas SET ttl_us=?2, "
                                    "absolute_ttl=?3, pin=?4 WHERE name=?1"));
    update.Bind(1, args.name);
    BindPolicy(2, *args.policy, &update);
    PC_RETURN_IF_ERROR(update.Run());
  }
  if (args.module_policies.empty()) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(SqliteStatement clear,
                      db_.Prepare("DELETE FROM module_policies WHERE name=?1"));
  clear.Bind(1, args.name);
  PC_RETURN_IF_ERROR(clear.Run());
  PC_ASSIGN_OR_RETURN(SqliteStatement insert,
                      db_.Prepare("INSERT INTO module_policies(name, path, "
                                  "ttl_us, absolute_ttl, pin) "
                                  "VALUES(?1, ?2, ?3, ?4, ?5)"));
  for (const auto& [path, policy] : args.module_policies) {
    insert.Bind(1, args.name).Bind(2, path);
    BindPolicy(3, policy, &insert);
    PC_RETURN_IF_ERROR(insert.Run());
  }
  return absl::OkStatus();
}

absl::StatusOr<SchemaRecord> Registry::GetSchema(const std::string& name,
                                                 uint64_t revision) const {
  MutexLock lock(&mu_);
  return Get(name, revision);
}

absl::StatusOr<SchemaRecord> Registry::Get(const std::string& name,
                                           uint64_t revision) const {
  PC_ASSIGN_OR_RETURN(
      SqliteStatement select,
      db_.Prepare(
          "SELECT r.revision, r.text, r.text_sha256, r.create_time_us, "
          "s.ttl_us, s.absolute_ttl, s.pin FROM schemas s "
          "JOIN schema_revisions r ON r.name=s.name WHERE s.name=?1 AND "
          "s.deleted=0 AND r.revision=CASE ?2 WHEN 0 THEN s.last_revision "
          "ELSE ?2 END"));
  // A revision beyond the signed range is unknown as well.
  const int64_t wanted =
      revision > uint64_t{INT64_MAX} ? -1 : static_cast<int64_t>(revision);
  select.Bind(1, name).Bind(2, wanted);
  PC_ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) {
    return absl::NotFoundError(
        revision == 0 ? absl::StrCat("no schema \"", name, "\"")
                      : absl::StrCat("no revision ", revision,
                                     " of a schema \"", name, "\""));
  }
  SchemaRecord schema;
  schema.name = name;
  schema.revision = static_cast<uint64_t>(select.Int(0));
  schema.text = select.Bytes(1);
  PC_ASSIGN_OR_RETURN(schema.text_sha256, Digest::FromBytes(select.Bytes(2)));
  schema.create_time = absl::FromUnixMicros(select.Int(3));
  schema.policy = ReadPolicy(4, select);
  PC_RETURN_IF_ERROR(ReadPolicies(&schema));
  return schema;
}

absl::Status Registry::ReadPolicies(SchemaRecord* schema) const {
  PC_ASSIGN_OR_RETURN(SqliteStatement select,
                      db_.Prepare("SELECT path, ttl_us, absolute_ttl, pin FROM "
                                  "module_policies WHERE name=?1"));
  select.Bind(1, schema->name);
  while (true) {
    PC_ASSIGN_OR_RETURN(const bool row, select.Step());
    if (!row) return absl::OkStatus();
    schema->module_policies[select.Bytes(0)] = ReadPolicy(1, select);
  }
}

absl::StatusOr<Registry::SchemaPage> Registry::ListSchemas(
    size_t page_size, const std::string& page_token) const {
  MutexLock lock(&mu_);
  PC_ASSIGN_OR_RETURN(
      SqliteStatement select,
      db_.Prepare("SELECT s.name, r.revision, r.text_sha256, r.create_time_us, "
                  "s.ttl_us, s.absolute_ttl, s.pin FROM schemas s "
                  "JOIN schema_revisions r ON r.name=s.name AND "
                  "r.revision=s.last_revision WHERE s.deleted=0 AND s.name>?1 "
                  "ORDER BY s.name LIMIT ?2"));
  page_size = std::clamp<size_t>(page_size, 1, 1000);
  // The token is the last name of the page before. One more row than asked
  // for says whether there is another page.
  select.Bind(1, page_token).Bind(2, static_cast<int64_t>(page_size) + 1);
  SchemaPage page;
  while (true) {
    PC_ASSIGN_OR_RETURN(const bool row, select.Step());
    if (!row) return page;
    if (page.schemas.size() == page_size) {
      page.next_page_token = page.schemas.back().name;
      return page;
    }
    SchemaRecord schema;
    schema.name = select.Bytes(0);
    schema.revision = static_cast<uint64_t>(select.Int(1));
    PC_ASSIGN_OR_RETURN(schema.text_sha256, Digest::FromBytes(select.Bytes(2)));
    schema.create_time = absl::FromUnixMicros(select.Int(3));
    schema.policy = ReadPolicy(4, select);
    PC_RETURN_IF_ERROR(ReadPolicies(&schema));
    page.schemas.push_back(std::move(schema));
  }
}

absl::Status Registry::DeleteSchema(const std::string& name) {
  MutexLock lock(&mu_);
  PC_ASSIGN_OR_RETURN(SqliteTransaction transaction,
                      SqliteTransaction::Begin(&db_));
  PC_ASSIGN_OR_RETURN(
      SqliteStatement mark,
      db_.Prepare("UPDATE schemas SET deleted=1, ttl_us=NULL, absolute_ttl=0, "
                  "pin=0 WHERE name=?1 AND deleted=0"));
  mark.Bind(1, name);
  PC_RETURN_IF_ERROR(mark.Run());
  if (db_.Changes() == 0) {
    return absl::NotFoundError(absl::StrCat("no schema \"", name, "\""));
  }
  for (const char* table : {"schema_revisions", "module_policies"}) {
    PC_ASSIGN_OR_RETURN(
        SqliteStatement remove,
        db_.Prepare(absl::StrCat("DELETE FROM ", table, " WHERE name=?1")));
    remove.Bind(1, name);
    PC_RETURN_IF_ERROR(remove.Run());
  }
  return transaction.Commit();
}

absl::StatusOr<uint64_t> Registry::CountSchemas() const {
  MutexLock lock(&mu_);
  PC_ASSIGN_OR_RETURN(
      const int64_t count,
      db_.QueryInt("SELECT COUNT(*) FROM schemas WHERE deleted=0"));
  return static_cast<uint64_t>(count);
}

absl::StatusOr<std::vector<ModuleRecord>> Registry::LoadModules() const {
  MutexLock lock(&mu_);
  return ModuleLog::Load(&db_);
}

}  // namespace promptcache::daemon
