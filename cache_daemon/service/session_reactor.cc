#include "cache_daemon/service/session_reactor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_daemon/service/pins.h"
#include "cache_daemon/service/proto_convert.h"
#include "cache_daemon/service/session_proto_convert.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxPendingParts = 65536;

// Which request a failure answers; 0 for those that are not answered.
uint64_t RequestId(const node::v1::SessionRequest& request) {
  if (request.has_acquire()) return request.acquire().request_id();
  if (request.has_commit()) return request.commit().request_id();
  if (request.has_set_policy()) return request.set_policy().request_id();
  return 0;
}

node::v1::SessionResponse Failure(uint64_t request_id,
                                  const absl::Status& status) {
  node::v1::SessionResponse response;
  node::v1::RequestFailed* failed = response.mutable_request_failed();
  failed->set_request_id(request_id);
  failed->set_code(static_cast<int32_t>(status.code()));
  failed->set_message(std::string(status.message()));
  return response;
}

}  // namespace

bool SessionHub::Add(std::shared_ptr<SessionReactor> session) {
  MutexLock lock(&mu_);
  if (closed_ || sessions_.size() >= max_sessions_) return false;
  const SessionReactor* key = session.get();
  sessions_[key] = std::move(session);
  return true;
}

void SessionHub::Remove(const SessionReactor* session) {
  std::shared_ptr<SessionReactor> removed;  // dropped after the lock
  MutexLock lock(&mu_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  removed = std::move(found->second);
  sessions_.erase(found);
}

std::vector<std::shared_ptr<SessionReactor>> SessionHub::All() const {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<SessionReactor>> all;
  all.reserve(sessions_.size());
  for (const auto& [key, session] : sessions_) all.push_back(session);
  return all;
}

void SessionHub::TellSchemaChanged(const std::string& name, uint64_t revision) {
  node::v1::SessionResponse response;
  response.mutable_schema_changed()->set_name(name);
  response.mutable_schema_changed()->set_revision(revision);
  for (const auto& session : All()) session->Push(response);
}

void SessionHub::EndAll() {
  {
    MutexLock lock(&mu_);
    closed_ = true;
  }
  for (const auto& session : All()) {
    session->End(absl::UnavailableError("the cache daemon shuts down"));
  }
}

SessionReactor* SessionReactor::Start(const SessionDeps* deps,
                                      grpc::CallbackServerContext* context) {
  std::shared_ptr<SessionReactor> reactor(new SessionReactor(deps, context));
  SessionReactor* raw = reactor.get();
  raw->self_ = reactor;
  if (deps->hub->Add(std::move(reactor))) {
    raw->StartRead(&raw->read_);
  } else {
    raw->End(absl::ResourceExhaustedError(
        "the cache daemon has no room for another session"));
  }
  return raw;
}

void SessionReactor::Push(const node::v1::SessionResponse& response) {
  {
    MutexLock lock(&mu_);
    // Nothing comes before the welcome.
    if (session_ == SessionId{} || Enqueue(response)) return;
  }
  End(absl::ResourceExhaustedError("the worker does not read its answers"),
      /*cut_off=*/true);
}

bool SessionReactor::Enqueue(node::v1::SessionResponse response) {
  if (ended_) return true;  // nobody is there to miss it
  if (!writing_) {
    Write(std::move(response));
    return true;
  }
  const size_t num_bytes = response.ByteSizeLong();
  queued_bytes_ += num_bytes;
  writes_.push_back({std::move(response), num_bytes});
  return writes_.size() <= deps_.max_queued_messages &&
         queued_bytes_ <= deps_.max_queued_bytes;
}

void SessionReactor::Write(node::v1::SessionResponse response) {
  write_ = std::move(response);
  writing_ = true;
  StartWrite(&write_);
}

void SessionReactor::End(const absl::Status& status, bool cut_off) {
  // Finish lets OnDone come, which drops the last reference but this one.
  const std::shared_ptr<SessionReactor> self = shared_from_this();
  SessionId session;
  {
    MutexLock lock(&mu_);
    if (ended_) return;
    ended_ = true;
    session = session_;
    writes_.clear();
    held_back_.clear();
    if (cut_off) context_->TryCancel();
    // Under the lock, so that no write is started after it.
    Finish(rpc::ToGrpcStatus(status));
  }
  deps_.hub->Remove(this);
  const std::string why =
      status.ok() ? "closed by the worker" : std::string(status.message());
  if (session != SessionId{}) {
    deps_.cache->CloseSession(session, why);
    LOG(INFO) << "session " << static_cast<uint64_t>(session)
              << " ended: " << why;
  } else if (!status.ok()) {
    LOG(WARNING) << "a session was refused: " << why;
  }
}

void SessionReactor::OnReadDone(bool ok) {
  if (!ok) {
    End(absl::OkStatus());  // half-closed, or the connection is gone
    return;
  }
  const absl::Status status = Handle(read_);
  if (!status.ok()) {
    if (open_session_ == SessionId{} || read_.has_hello()) {
      End(status);
      return;
    }
    Push(Failure(RequestId(read_), status));
  }
  MutexLock lock(&mu_);
  if (!ended_) StartRead(&read_);
}

void SessionReactor::OnWriteDone(bool ok) {
  if (!ok) {
    End(absl::UnavailableError("the connection is gone"));
    return;
  }
  MutexLock lock(&mu_);
  writing_ = false;
  if (ended_ || writes_.empty()) return;
  Queued next = std::move(writes_.front());
  writes_.pop_front();
  queued_bytes_ -= next.num_bytes;
  Write(std::move(next.response));
}

void SessionReactor::OnCancel() {
  End(absl::CancelledError("the connection is gone"));
}

void SessionReactor::OnDone() {
  const std::shared_ptr<SessionReactor> self = std::move(self_);
}

absl::Status SessionReactor::Handle(const node::v1::SessionRequest& request) {
  using Message = node::v1::SessionRequest::MessageCase;
  const bool open = open_session_ != SessionId{};
  if (open == request.has_hello()) {
    return absl::FailedPreconditionError(
        open ? "a second hello" : "the first message must be a hello");
  }
  switch (request.message_case()) {
    case Message::kHello:
      return HandleHello(request.hello());
    case Message::kAcquire:
      return HandleAcquire(request.acquire());
    case Message::kCommit:
      return HandleCommit(request.commit());
    case Message::kRelease:
      return deps_.cache->Release(open_session_,
                                  LeaseId{request.release().lease_id()});
    case Message::kAbort: {
      std::vector<ReservationId> ids;
      for (const uint64_t id : request.abort().reservation_ids()) {
        ids.push_back(ReservationId{id});
      }
      return deps_.cache->Abort(open_session_, ids);
    }
    case Message::kReportCorruption:
      return HandleReport(request.report_corruption());
    case Message::kReportUse:
      deps_.cache->ReportUse(FromProto(request.report_use()));
      return absl::OkStatus();
    case Message::kSetPolicy:
      return HandleSetPolicy(request.set_policy());
    case Message::MESSAGE_NOT_SET:
      break;
  }
  return absl::UnimplementedError("a message that this daemon does not know");
}

absl::StatusOr<SessionId> SessionReactor::OpenSession(
    const node::v1::Hello& hello) {
  if (hello.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("protocol version ", hello.protocol_version(),
                     ", this daemon speaks ", kProtocolVersion));
  }
  if (hello.worker_id().size() > kMaxNameBytes ||
      hello.model().size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "worker_id and model have at most ", kMaxNameBytes, " bytes each"));
  }
  PC_ASSIGN_OR_RETURN(const KvLayout layout, FromProto(hello.layout()));
  PC_ASSIGN_OR_RETURN(
      device_, FindWorkerDevice(DeviceFromProto(hello), deps_.cache->pool()));
  PC_ASSIGN_OR_RETURN(PeerProcess peer,
                      deps_.fd_server->RedeemToken(hello.token()));
  PC_ASSIGN_OR_RETURN(
      const ProcessId process,
      deps_.processes->Watch(std::move(peer.pidfd), peer.credentials.pid));
  shape_ = {.page_bytes = layout.page_bytes(),
            .page_tokens = layout.page_tokens,
            .num_layers = layout.num_layers};
  // Called while the session is open, and once more at most after.
  auto resolved = [weak = weak_from_this()](const PendingResolved& what) {
    if (const auto self = weak.lock()) self->OnResolved(what);
  };
  return deps_.cache->OpenSession(
      {.worker_id = hello.worker_id(),
       .model = hello.model(),
       .shape = shape_,
       .device = device_,
       .process = process,
       .on_resolved = std::move(resolved),
       .reads_arriving =
           hello.reads_arriving() && deps_.cache->pool().on_gpu()});
}

absl::Status SessionReactor::HandleHello(const node::v1::Hello& hello) {
  PC_ASSIGN_OR_RETURN(open_session_, OpenSession(hello));
  node::v1::SessionResponse response;
  node::v1::Welcome* welcome = response.mutable_welcome();
  welcome->set_session_id(static_cast<uint64_t>(open_session_));
  welcome->set_page_bytes(shape_.page_bytes);
  DescribeSegments(deps_.cache->pool(), device_, welcome);
  welcome->set_daemon_id(deps_.daemon_id);
  welcome->set_acquire_releases(true);
  welcome->set_joined_paths(true);
  {
    MutexLock lock(&mu_);
    if (!ended_) {
      session_ = open_session_;
      LOG(INFO) << "session " << welcome->session_id() << " of worker "
                << hello.worker_id() << " on " << welcome->device_uuid()
                << ", model " << hello.model() << ", pages of "
                << shape_.page_bytes << " bytes";
      Enqueue(std::move(response));
      return absl::OkStatus();
    }
  }
  // Ended while it was being opened: End did not know of it.
  deps_.cache->CloseSession(open_session_, "ended while it was opened");
  return absl::OkStatus();
}

absl::Status SessionReactor::HandleAcquire(
    const node::v1::AcquireRequest& request) {
  // Whatever becomes of the Acquire: they are named nowhere else.
  for (const uint64_t lease_id : request.released_leases()) {
    const absl::Status released =
        deps_.cache->Release(open_session_, LeaseId{lease_id});
    // As for a ReleaseRequest: not the Acquire's fault.
    if (!released.ok()) Push(Failure(/*request_id=*/0, released));
  }
  PC_ASSIGN_OR_RETURN(const std::vector<AcquireKey> keys,
                      KeysFromProto(request));
  const uint64_t request_id = request.request_id();
  {
    MutexLock lock(&mu_);
    acquiring_ = request_id;
  }
  const std::string& domain = request.isolation_domain();
  const absl::StatusOr<AcquireResult> result = deps_.cache->Acquire(
      open_session_,
      {.request_id = request_id,
       .keys = keys,
       .reserve_missing = request.reserve_missing(),
       .want_page_sums = request.want_page_sums(),
       .purpose = FromProto(request.purpose()),
       .no_wait = request.no_wait(),
       .schema = request.schema(),
       .isolation_domain = domain.empty() ? std::string_view("default")
                                          : std::string_view(domain)});
  node::v1::SessionResponse response;
  if (result.ok()) {
    *response.mutable_acquire() = ToProto(request_id, *result);
    if (parts_.size() > kMaxPendingParts) parts_.clear();
    for (size_t i = 0; i < keys.size(); ++i) {
      if (result->modules[i].outcome == Outcome::kReserved ||
          result->modules[i].outcome == Outcome::kPending) {
        parts_[keys[i].key] = keys[i].parts;
      }
    }
  }
  bool fits = true;
  {
    MutexLock lock(&mu_);
    acquiring_.reset();
    if (result.ok()) fits = Enqueue(std::move(response));
    for (auto& held : std::exchange(held_back_, {})) {
      fits = Enqueue(std::move(held)) && fits;
    }
  }
  if (!fits) {
    End(absl::ResourceExhaustedError("the worker does not read its answers"),
        /*cut_off=*/true);
  }
  return result.status();
}

void SessionReactor::OnResolved(const PendingResolved& resolved) {
  node::v1::SessionResponse response;
  *response.mutable_pending_resolved() = ToProto(resolved);
  {
    MutexLock lock(&mu_);
    if (acquiring_ == resolved.request_id) {
      held_back_.push_back(std::move(response));
      return;
    }
  }
  Push(response);
}

absl::Status SessionReactor::HandleCommit(
    const node::v1::CommitRequest& request) {
  PC_ASSIGN_OR_RETURN(const std::vector<CommitModule> modules,
                      ModulesFromProto(request, shape_));
  PC_ASSIGN_OR_RETURN(const std::vector<CommitResult> results,
                      deps_.cache->Commit(open_session_, modules));
  node::v1::SessionResponse response;
  response.mutable_commit()->set_request_id(request.request_id());
  for (const CommitResult& result : results) {
    response.mutable_commit()->add_committed(result.committed);
    response.mutable_commit()->add_pin_refused(result.pin_refused);
  }
  Push(response);
  Record(modules, results);
  return absl::OkStatus();
}

void SessionReactor::Record(const std::vector<CommitModule>& modules,
                            const std::vector<CommitResult>& results) {
  const absl::Time now = deps_.clock->Now();
  for (size_t i = 0; i < modules.size(); ++i) {
    if (!results[i].committed) continue;
    IdentityParts parts{};
    if (const auto found = parts_.find(results[i].key); found != parts_.end()) {
      parts = found->second;
      parts_.erase(found);
    }
    const uint64_t num_bytes =
        shape_.PagesFor(modules[i].metadata.num_tokens) * shape_.page_bytes;
    deps_.module_log->Put(
        ToRecord(modules[i], results[i], parts, num_bytes, now));
  }
}

absl::Status SessionReactor::HandleSetPolicy(
    const node::v1::SetPolicyRequest& request) {
  PC_ASSIGN_OR_RETURN(const std::vector<PolicyChange> changes,
                      ChangesFromProto(request));
  const PolicyResult result = deps_.cache->SetPolicy(changes);
  ApplyPins(result, deps_.module_log);
  if (request.request_id() == 0) return absl::OkStatus();
  node::v1::SessionResponse response;
  response.mutable_set_policy()->set_request_id(request.request_id());
  for (const PolicyChange& change : changes) {
    response.mutable_set_policy()->add_pin_refused(std::ranges::any_of(
        result.pins_refused,
        [&](const RefusedPin& refused) { return refused.key == change.key; }));
  }
  Push(response);
  return absl::OkStatus();
}

absl::Status SessionReactor::HandleReport(
    const node::v1::ReportCorruption& report) {
  PC_ASSIGN_OR_RETURN(const ModuleKey key, Digest::FromBytes(report.key()));
  // Reads the module's pages. Dropped when too many wait: the module is found
  // again by whoever loads it next.
  deps_.tasks->Add(
      [cache = deps_.cache, key, generation = report.generation()] {
        if (cache->ReportCorruption(key, generation)) {
          LOG(ERROR) << "module " << key.ToHex() << " is corrupt";
        }
      });
  return absl::OkStatus();
}

}  // namespace promptcache::daemon
