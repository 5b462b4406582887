#include "cache_daemon/registry/module_log.h"

#include <cstring>
#include <utility>

#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr char kInsert[] =
    "INSERT INTO modules(key, schema, path, isolation_domain, num_tokens, "
    "num_bytes, text_sha256, context_key, identity_parts, compute_us, "
    "commit_time_us, ttl_us, absolute_ttl, pin) "
    "VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14) "
    "ON CONFLICT(key) DO NOTHING";
constexpr char kUpdate[] =
    "UPDATE modules SET schema=?2, path=?3, isolation_domain=?4, "
    "num_tokens=?5, num_bytes=?6, text_sha256=?7, context_key=?8, "
    "identity_parts=?9, compute_us=?10, commit_time_us=?11, ttl_us=?12, "
    "absolute_ttl=?13, pin=?14 WHERE key=?1";
constexpr char kSelect[] =
    "SELECT key, schema, path, isolation_domain, num_tokens, num_bytes, "
    "text_sha256, context_key, identity_parts, compute_us, commit_time_us, "
    "ttl_us, absolute_ttl, pin FROM modules ORDER BY key";

std::string_view BytesOf(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()),
          digest.bytes.size()};
}

void BindModule(const ModuleRecord& m, SqliteStatement* s) {
  s->Bind(1, BytesOf(m.key)).Bind(2, m.schema).Bind(3, m.path);
  s->Bind(4, m.isolation_domain).Bind(5, int64_t{m.num_tokens});
  s->Bind(6, static_cast<int64_t>(m.num_bytes));
  s->Bind(7, BytesOf(m.text_sha256)).Bind(8, BytesOf(m.context_key));
  s->Bind(9, std::string_view(reinterpret_cast<const char*>(m.parts.data()),
                              sizeof(m.parts)));
  s->Bind(10, static_cast<int64_t>(m.compute_us));
  s->Bind(11, absl::ToUnixMicros(m.commit_time));
  if (m.policy.ttl.has_value()) {
    s->Bind(12, absl::ToInt64Microseconds(*m.policy.ttl));
  } else {
    s->BindNull(12);
  }
  s->Bind(13, int64_t{m.policy.absolute_ttl});
  s->Bind(14, int64_t{m.policy.pin});
}

absl::StatusOr<ModuleRecord> ReadModule(const SqliteStatement& s) {
  ModuleRecord m;
  PC_ASSIGN_OR_RETURN(m.key, Digest::FromBytes(s.Bytes(0)));
  m.schema = s.Bytes(1);
  m.path = s.Bytes(2);
  m.isolation_domain = s.Bytes(3);
  m.num_tokens = static_cast<uint32_t>(s.Int(4));
  m.num_bytes = static_cast<uint64_t>(s.Int(5));
  PC_ASSIGN_OR_RETURN(m.text_sha256, Digest::FromBytes(s.Bytes(6)));
  PC_ASSIGN_OR_RETURN(m.context_key, Digest::FromBytes(s.Bytes(7)));
  const std::string parts = s.Bytes(8);
  if (parts.size() != sizeof(m.parts)) {
    return absl::DataLossError("registry: a module's identity is cut short");
  }
  std::memcpy(m.parts.data(), parts.data(), parts.size());
  m.compute_us = static_cast<uint64_t>(s.Int(9));
  m.commit_time = absl::FromUnixMicros(s.Int(10));
  if (!s.IsNull(11)) m.policy.ttl = absl::Microseconds(s.Int(11));
  m.policy.absolute_ttl = s.Int(12) != 0;
  m.policy.pin = s.Int(13) != 0;
  return m;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModuleLog>> ModuleLog::Create(
    const Options& options, const std::string& path) {
  PC_ASSIGN_OR_RETURN(SqliteDb db, SqliteDb::Open(path));
  // A lost tail of modules only costs encoding them again: no fsync a batch.
  PC_RETURN_IF_ERROR(db.Exec("PRAGMA synchronous=NORMAL"));
  // Nobody waits for this thread: rather late than a batch lost to a lock.
  PC_RETURN_IF_ERROR(db.Exec("PRAGMA busy_timeout=60000"));
  // Once: to count them takes as long as there are many.
  PC_ASSIGN_OR_RETURN(const int64_t num_modules,
                      db.QueryInt("SELECT COUNT(*) FROM modules"));
  std::unique_ptr<ModuleLog> log(new ModuleLog(
      options, std::move(db), static_cast<uint64_t>(num_modules)));
  log->thread_ = std::thread([raw = log.get()] { raw->Run(); });
  return log;
}

ModuleLog::ModuleLog(const Options& options, SqliteDb db, uint64_t num_modules)
    : options_(options), db_(std::move(db)), num_modules_(num_modules) {}

ModuleLog::~ModuleLog() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void ModuleLog::Put(const ModuleRecord& module) {
  MutexLock lock(&mu_);
  Enqueue(module.key, Change{.kind = ChangeKind::kPut, .module = module});
}

void ModuleLog::SetPin(const ModuleKey& key, bool pin) {
  MutexLock lock(&mu_);
  if (const auto queued = queue_.find(key); queued != queue_.end()) {
    queued->second.module.policy.pin = pin;
    return;
  }
  Change change{.kind = ChangeKind::kSetPin, .module = {}};
  change.module.policy.pin = pin;
  Enqueue(key, std::move(change));
}

void ModuleLog::Enqueue(const ModuleKey& key, Change change) {
  if (queue_.size() >= options_.max_queued && !queue_.contains(key)) {
    ++num_dropped_;
    return;
  }
  const bool was_empty = queue_.empty();
  queue_.insert_or_assign(key, std::move(change));
  if (was_empty) wake_.Signal();
}

absl::Status ModuleLog::Flush() {
  MutexLock lock(&mu_);
  ++num_flushing_;
  wake_.Signal();
  while (!queue_.empty() || writing_) written_.Wait(&mu_);
  --num_flushing_;
  return std::exchange(last_error_, absl::OkStatus());
}

uint64_t ModuleLog::num_dropped() const {
  MutexLock lock(&mu_);
  return num_dropped_;
}

ModuleLog::Changes ModuleLog::TakeBatch() {
  if (queue_.size() <= options_.max_batch) return std::exchange(queue_, {});
  Changes batch;
  // From where the last one was: begin() looks for the first that is left.
  for (auto next = queue_.begin(); batch.size() < options_.max_batch;) {
    batch.insert(queue_.extract(next++));
  }
  return batch;
}

void ModuleLog::Run() {
  mu_.Lock();
  while (true) {
    while (queue_.empty() && !stopping_) wake_.Wait(&mu_);
    if (queue_.empty()) break;  // stopping
    const absl::Time due = absl::Now() + options_.flush_interval;
    while (!stopping_ && num_flushing_ == 0 &&
           queue_.size() < options_.max_batch && absl::Now() < due) {
      wake_.WaitWithTimeout(&mu_, due - absl::Now());
    }
    const Changes batch = TakeBatch();
    writing_ = true;
    mu_.Unlock();
    const absl::Status status = Write(batch);
    if (!status.ok()) {
      LOG(ERROR) << batch.size()
                 << " modules are not in the registry: " << status;
    }
    mu_.Lock();
    writing_ = false;
    if (!status.ok()) last_error_ = status;
    written_.SignalAll();
  }
  mu_.Unlock();
}

absl::Status ModuleLog::Write(const Changes& batch) {
  PC_ASSIGN_OR_RETURN(SqliteTransaction transaction,
                      SqliteTransaction::Begin(&db_));
  uint64_t num_modules = num_modules_;
  PC_RETURN_IF_ERROR(WriteChanges(batch, &num_modules));
  PC_RETURN_IF_ERROR(Trim(&num_modules));
  PC_RETURN_IF_ERROR(transaction.Commit());
  num_modules_ = num_modules;
  return absl::OkStatus();
}

absl::Status ModuleLog::WriteChanges(const Changes& batch,
                                     uint64_t* num_modules) {
  PC_ASSIGN_OR_RETURN(SqliteStatement insert, db_.Prepare(kInsert));
  PC_ASSIGN_OR_RETURN(SqliteStatement update, db_.Prepare(kUpdate));
  PC_ASSIGN_OR_RETURN(SqliteStatement set_pin,
                      db_.Prepare("UPDATE modules SET pin=?2 WHERE key=?1"));
  for (const auto& [key, change] : batch) {
    if (change.kind == ChangeKind::kSetPin) {
      set_pin.Bind(1, BytesOf(key));
      set_pin.Bind(2, int64_t{change.module.policy.pin});
      PC_RETURN_IF_ERROR(set_pin.Run());
      continue;
    }
    BindModule(change.module, &insert);
    PC_RETURN_IF_ERROR(insert.Run());
    if (db_.Changes() > 0) {
      ++*num_modules;
      continue;
    }
    BindModule(change.module, &update);
    PC_RETURN_IF_ERROR(update.Run());
  }
  return absl::OkStatus();
}

absl::Status ModuleLog::Trim(uint64_t* num_modules) {
  if (*num_modules <= options_.max_modules) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(
      SqliteStatement trim,
      db_.Prepare("DELETE FROM modules WHERE key IN (SELECT key FROM modules "
                  "ORDER BY commit_time_us, key LIMIT ?1)"));
  trim.Bind(1, static_cast<int64_t>(*num_modules - options_.max_modules));
  PC_RETURN_IF_ERROR(trim.Run());
  *num_modules -= static_cast<uint64_t>(db_.Changes());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ModuleRecord>> ModuleLog::Load(SqliteDb* db) {
  std::vector<ModuleRecord> modules;
  PC_ASSIGN_OR_RETURN(SqliteStatement select, db->Prepare(kSelect));
  while (true) {
    PC_ASSIGN_OR_RETURN(const bool row, select.Step());
    if (!row) return modules;
    PC_ASSIGN_OR_RETURN(ModuleRecord module, ReadModule(select));
    modules.push_back(std::move(module));
  }
}

}  // namespace promptcache::daemon
