#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct sqlite3;
struct sqlite3_stmt;

namespace promptcache::daemon {

// One compiled statement, run once or many times. Thread-compatible. Must not
// outlive the SqliteDb that prepared it.
class SqliteStatement {
 public:
  SqliteStatement() = default;

  // Parameters count from 1. An error shows at the next Step.
  SqliteStatement& Bind(int index, int64_t value);
  SqliteStatement& Bind(int index, std::string_view bytes);  // copied
  SqliteStatement& BindNull(int index);

  // True: a row is there to read. False: done.
  absl::StatusOr<bool> Step();
  // Runs to the end, ignoring rows, and resets.
  absl::Status Run();
  void Reset();

  // Columns count from 0; valid after a Step that gave a row.
  int64_t Int(int column) const;
  std::string Bytes(int column) const;
  bool IsNull(int column) const;

 private:
  friend class SqliteDb;
  struct Finalize {
    void operator()(sqlite3_stmt* statement) const;
  };
  std::unique_ptr<sqlite3_stmt, Finalize> statement_;
  int bind_error_ = 0;
};

// One connection to a SQLite file in WAL mode. Thread-compatible: one thread at
// a time. Several connections to one file may be used at once.
class SqliteDb {
 public:
  // Creates the file (mode 0600) when it is missing. DataLoss when it is
  // damaged or no database, PermissionDenied when it cannot be opened or
  // written, Unavailable when another process holds it.
  static absl::StatusOr<SqliteDb> Open(const std::string& path);

  absl::Status Exec(const std::string& sql);
  absl::StatusOr<SqliteStatement> Prepare(const std::string& sql);
  // The value of a pragma or query that gives one integer.
  absl::StatusOr<int64_t> QueryInt(const std::string& sql);
  // Full check of all pages; DataLoss with SQLite's words.
  absl::Status CheckIntegrity();
  // Rows the last statement changed.
  int64_t Changes() const;

 private:
  struct Close {
    void operator()(sqlite3* db) const;
  };
  absl::Status Error(int code, const std::string& what) const;

  std::string path_;
  std::unique_ptr<sqlite3, Close> db_;
};

// BEGIN IMMEDIATE in Begin, ROLLBACK in the destructor unless Commit was
// called and succeeded. Must not outlive the database.
class SqliteTransaction {
 public:
  static absl::StatusOr<SqliteTransaction> Begin(SqliteDb* db);
  SqliteTransaction(SqliteTransaction&& other) noexcept;
  SqliteTransaction& operator=(SqliteTransaction&&) = delete;
  ~SqliteTransaction();
  absl::Status Commit();

 private:
  explicit SqliteTransaction(SqliteDb* db) : db_(db) {}
  SqliteDb* db_;
};

}  // namespace promptcache::daemon
