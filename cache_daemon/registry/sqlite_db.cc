#include "cache_daemon/registry/sqlite_db.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace promptcache::daemon {
namespace {

constexpr int kBusyTimeoutMs = 2000;

absl::StatusCode CodeOf(int sqlite_code) {
  switch (sqlite_code & 0xff) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::StatusCode::kDataLoss;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::StatusCode::kUnavailable;
    case SQLITE_FULL:
    case SQLITE_NOMEM:
      return absl::StatusCode::kResourceExhausted;
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_AUTH:
      return absl::StatusCode::kPermissionDenied;
    default:
      return absl::StatusCode::kInternal;
  }
}

absl::Status StatementError(sqlite3_stmt* statement, int code) {
  sqlite3* db = sqlite3_db_handle(statement);
  const char* path = sqlite3_db_filename(db, "main");
  return absl::Status(
      CodeOf(code), absl::StrCat("registry ", path == nullptr ? "" : path, ": ",
                                 sqlite3_errmsg(db)));
}

// Makes the file, since SQLite would make it readable for others. One that is
// there is not opened: closing it again would drop the locks of this process's
// other connections to it (POSIX locks go with any descriptor of their file).
// Another program that looks into the registry would then take itself for the
// last one, and remove the log that we go on writing to.
absl::Status MakeFile(const std::string& path) {
  const UniqueFd made(::open(
      path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (made) return absl::OkStatus();
  int error = errno;
  if (error == EEXIST) {
    struct stat info{};
    if (::lstat(path.c_str(), &info) != 0) {
      error = errno;
    } else if (S_ISREG(info.st_mode)) {
      return absl::OkStatus();
    } else {
      error = S_ISDIR(info.st_mode) ? EISDIR : ELOOP;
    }
  }
  return absl::ErrnoToStatus(error, absl::StrCat("registry ", path));
}

}  // namespace

void SqliteStatement::Finalize::operator()(sqlite3_stmt* statement) const {
  sqlite3_finalize(statement);
}

SqliteStatement& SqliteStatement::Bind(int index, int64_t value) {
  bind_error_ |= sqlite3_bind_int64(statement_.get(), index, value);
  return *this;
}

SqliteStatement& SqliteStatement::Bind(int index, std::string_view bytes) {
  // A null pointer would bind NULL; an empty value is not that.
  const char* data = bytes.data() == nullptr ? "" : bytes.data();
  bind_error_ |= sqlite3_bind_blob64(statement_.get(), index, data,
                                     bytes.size(), SQLITE_TRANSIENT);
  return *this;
}

SqliteStatement& SqliteStatement::BindNull(int index) {
  bind_error_ |= sqlite3_bind_null(statement_.get(), index);
  return *this;
}

absl::StatusOr<bool> SqliteStatement::Step() {
  if (bind_error_ != SQLITE_OK) {
    return StatementError(statement_.get(), bind_error_);
  }
  const int code = sqlite3_step(statement_.get());
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  return StatementError(statement_.get(), code);
}

absl::Status SqliteStatement::Run() {
  absl::StatusOr<bool> row = true;
  while (row.ok() && *row) row = Step();
  Reset();
  return row.status();
}

void SqliteStatement::Reset() {
  sqlite3_reset(statement_.get());
  sqlite3_clear_bindings(statement_.get());
  bind_error_ = SQLITE_OK;
}

int64_t SqliteStatement::Int(int column) const {
  return sqlite3_column_int64(statement_.get(), column);
}

std::string SqliteStatement::Bytes(int column) const {
  const void* data = sqlite3_column_blob(statement_.get(), column);
  const int num_bytes = sqlite3_column_bytes(statement_.get(), column);
  if (data == nullptr) return "";
  return std::string(static_cast<const char*>(data),
                     static_cast<size_t>(num_bytes));
}

bool SqliteStatement::IsNull(int column) const {
  return sqlite3_column_type(statement_.get(), column) == SQLITE_NULL;
}

void SqliteDb::Close::operator()(sqlite3* db) const { sqlite3_close_v2(db); }

absl::Status SqliteDb::Error(int code, const std::string& what) const {
  return absl::Status(CodeOf(code),
                      absl::StrCat("registry ", path_, ": ", what, ": ",
                                   db_ == nullptr ? sqlite3_errstr(code)
                                                  : sqlite3_errmsg(db_.get())));
}

absl::StatusOr<SqliteDb> SqliteDb::Open(const std::string& path) {
  PC_RETURN_IF_ERROR(MakeFile(path));
  SqliteDb db;
  db.path_ = path;
  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(
      path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
  db.db_.reset(raw);
  if (code != SQLITE_OK) return db.Error(code, "open");
  sqlite3_extended_result_codes(raw, 1);
  sqlite3_busy_timeout(raw, kBusyTimeoutMs);
  PC_RETURN_IF_ERROR(db.Exec("PRAGMA journal_mode=WAL"));
  PC_RETURN_IF_ERROR(db.Exec("PRAGMA foreign_keys=ON"));
  return db;
}

absl::Status SqliteDb::Exec(const std::string& sql) {
  const int code =
      sqlite3_exec(db_.get(), sql.c_str(), nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) return Error(code, sql.substr(0, 40));
  return absl::OkStatus();
}

absl::StatusOr<SqliteStatement> SqliteDb::Prepare(const std::string& sql) {
  sqlite3_stmt* raw = nullptr;
  const int code = sqlite3_prepare_v2(
      db_.get(), sql.data(), static_cast<int>(sql.size()), &raw, nullptr);
  SqliteStatement statement;
  statement.statement_.reset(raw);
  if (code != SQLITE_OK) return Error(code, sql.substr(0, 40));
  return statement;
}

absl::StatusOr<int64_t> SqliteDb::QueryInt(const std::string& sql) {
  PC_ASSIGN_OR_RETURN(SqliteStatement statement, Prepare(sql));
  PC_ASSIGN_OR_RETURN(const bool row, statement.Step());
  if (!row) {
    return absl::InternalError(
        absl::StrCat("registry ", path_, ": no row for ", sql));
  }
  return statement.Int(0);
}

absl::Status SqliteDb::CheckIntegrity() {
  PC_ASSIGN_OR_RETURN(SqliteStatement check, Prepare("PRAGMA quick_check(1)"));
  PC_ASSIGN_OR_RETURN(const bool row, check.Step());
  const std::string verdict = row ? check.Bytes(0) : "no answer";
  if (verdict == "ok") return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("registry ", path_, ": ", verdict));
}

int64_t SqliteDb::Changes() const { return sqlite3_changes64(db_.get()); }

absl::StatusOr<SqliteTransaction> SqliteTransaction::Begin(SqliteDb* db) {
  PC_RETURN_IF_ERROR(db->Exec("BEGIN IMMEDIATE"));
  return SqliteTransaction(db);
}

SqliteTransaction::SqliteTransaction(SqliteTransaction&& other) noexcept
    : db_(std::exchange(other.db_, nullptr)) {}

SqliteTransaction::~SqliteTransaction() {
  // A failed ROLLBACK means that SQLite has rolled back by itself.
  if (db_ != nullptr) db_->Exec("ROLLBACK").IgnoreError();
}

absl::Status SqliteTransaction::Commit() {
  PC_RETURN_IF_ERROR(db_->Exec("COMMIT"));
  db_ = nullptr;
  return absl::OkStatus();
}

}  // namespace promptcache::daemon
