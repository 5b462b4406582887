#include "inference_worker/cache/cache_client.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cache/lease_client.h"
#include "inference_worker/cache/proto_convert.h"
#include "inference_worker/cache/session_client.h"

namespace promptcache::worker {
namespace {

constexpr absl::Duration kMinBackoff = absl::Milliseconds(50);
constexpr absl::Duration kMaxBackoff = absl::Seconds(2);
constexpr absl::Duration kUnusedWarning = absl::Seconds(10);

class GrpcCacheClient final : public CacheClient {
 public:
  explicit GrpcCacheClient(const Options& options)
      : options_(options), thread_([this] { Run(); }) {}

  ~GrpcCacheClient() override {
    std::shared_ptr<SessionClient> session;
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      session = session_ != nullptr ? session_ : draining_;
      changed_.SignalAll();
    }
    if (session != nullptr) session->Close();
    thread_.join();
  }

  bool attached() const override {
    MutexLock lock(&mu_);
    return session_ != nullptr && !session_->lost();
  }

  absl::Status WaitAttached(absl::Time deadline) override {
    MutexLock lock(&mu_);
    while ((session_ == nullptr || session_->lost()) &&
           absl::Now() < deadline) {
      changed_.WaitWithTimeout(&mu_, deadline - absl::Now());
    }
    if (session_ != nullptr && !session_->lost()) return absl::OkStatus();
    return absl::DeadlineExceededError(WhyNotAttached());
  }

  absl::StatusOr<std::unique_ptr<CacheLease>> Acquire(
      const AcquireArgs& args) override {
    PC_ASSIGN_OR_RETURN(std::shared_ptr<SessionClient> session, Current());
    return LeaseClient::Acquire(std::move(session), options_.layout, args,
                                absl::Now() + options_.acquire_timeout);
  }

  void ReportUse(const RequestUse& use) override {
    const auto session = Current();
    if (!session.ok()) return;
    node::v1::SessionRequest request;
    node::v1::ReportUse* const report = request.mutable_report_use();
    report->set_cached_tokens(use.cached_tokens);
    report->set_created_tokens(use.created_tokens);
    report->set_fresh_tokens(use.fresh_tokens);
    report->set_preemptions(use.preemptions);
    report->set_recomputed_tokens(use.recomputed_tokens);
    report->set_attention_needed_tokens(use.attention_needed_tokens);
    report->set_attention_read_tokens(use.attention_read_tokens);
    (*session)->Send(std::move(request));
  }

  absl::StatusOr<std::vector<bool>> SetPolicy(
      const std::vector<PolicyChange>& changes) override {
    PC_ASSIGN_OR_RETURN(const std::shared_ptr<SessionClient> session,
                        Current());
    const uint64_t request_id = session->NextRequestId();
    node::v1::SessionRequest request;
    request.mutable_set_policy()->set_request_id(request_id);
    for (const PolicyChange& change : changes) {
      node::v1::PolicyChange* out = request.mutable_set_policy()->add_changes();
      out->set_key(change.key.ToBytes());
      *out->mutable_policy() =
          PolicyToProto(change.ttl, change.absolute_ttl, change.pin);
      out->set_only_longer(change.only_longer);
    }
    PC_ASSIGN_OR_RETURN(const node::v1::SessionResponse response,
                        session->Call(request_id, std::move(request),
                                      absl::Now() + options_.acquire_timeout));
    const auto& refused = response.set_policy().pin_refused();
    if (refused.size() != static_cast<int>(changes.size())) {
      return absl::InternalError(
          "the daemon's answer is not one for these policies");
    }
    return std::vector<bool>(refused.begin(), refused.end());
  }

 private:
  absl::StatusOr<std::shared_ptr<SessionClient>> Current() const {
    MutexLock lock(&mu_);
    if (session_ != nullptr) return session_;
    return absl::UnavailableError(WhyNotAttached());
  }

  std::string WhyNotAttached() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return absl::StrCat("not attached to a cache daemon: ",
                        last_error_.ok() ? "the first attempt is not over"
                                         : last_error_.message());
  }

  void Run() {
    absl::BitGen random;
    absl::Duration backoff = kMinBackoff;
    while (!Stopping()) {
      auto session = SessionClient::Open(
          {.socket_path = options_.socket_path,
           .worker_id = options_.worker_id,
           .model = options_.model,
           .layout = options_.layout,
           .device = options_.device,
           .reads_arriving = options_.reads_arriving,
           .on_schema_changed = options_.on_schema_changed});
      if (!session.ok()) {
        SetError(session.status());
        Pause(backoff * absl::Uniform(random, 0.5, 1.0));
        backoff = std::min(backoff * 2, kMaxBackoff);
        continue;
      }
      backoff = kMinBackoff;
      Live(*session);
      session = absl::UnavailableError("over");  // unmaps what it had
      // A daemon that welcomes and leaves at once is not asked in a circle.
      Pause(backoff * absl::Uniform(random, 0.5, 1.0));
    }
  }

  // From the session's first moment to its last lease's.
  void Live(const std::shared_ptr<SessionClient>& session) {
    {
      MutexLock lock(&mu_);
      if (!stopping_) {
        session_ = session;
        last_error_ = absl::OkStatus();
      }
      changed_.SignalAll();
    }
    LOG(INFO) << "attached to the cache daemon at " << options_.socket_path
              << " as session " << session->welcome().session_id();
    if (options_.on_attached) options_.on_attached();
    if (!Stopping()) session->Attend();
    if (!Stopping()) LOG(WARNING) << session->loss().message();
    {
      MutexLock lock(&mu_);
      session_.reset();
      draining_ = session;
      last_error_ = session->loss();
      changed_.SignalAll();
    }
    // A new session would declare that nothing of this one is used any more.
    while (!session->WaitUnused(kUnusedWarning) && !Stopping()) {
      LOG(WARNING) << "leases of a lost session are still held: the worker "
                      "attaches again when they are dropped";
    }
    session->Close();
    MutexLock lock(&mu_);
    draining_.reset();
  }

  bool Stopping() const {
    MutexLock lock(&mu_);
    return stopping_;
  }

  void SetError(const absl::Status& status) {
    MutexLock lock(&mu_);
    // Once per reason, not once per attempt.
    if (status.message() != last_error_.message()) {
      LOG(WARNING) << "no cache daemon: " << status.message();
    }
    last_error_ = status;
  }

  void Pause(absl::Duration time) {
    const absl::Time deadline = absl::Now() + time;
    MutexLock lock(&mu_);
    while (!stopping_ && absl::Now() < deadline) {
      changed_.WaitWithTimeout(&mu_, deadline - absl::Now());
    }
  }

  const Options options_;

  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  // The current session; and a lost one while leases of it are held.
  std::shared_ptr<SessionClient> session_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<SessionClient> draining_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: uses all of the above
};

}  // namespace

absl::StatusOr<std::unique_ptr<CacheClient>> CacheClient::Create(
    const Options& options) {
  if (options.socket_path.empty()) {
    return absl::InvalidArgumentError("the daemon's socket path is empty");
  }
  PC_RETURN_IF_ERROR(options.layout.Validate());
  if (options.acquire_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "acquire_timeout ", absl::FormatDuration(options.acquire_timeout),
        " is not above 0"));
  }
  return std::make_unique<GrpcCacheClient>(options);
}

}  // namespace promptcache::worker
