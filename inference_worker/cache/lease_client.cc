#include "inference_worker/cache/lease_client.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fault_point.h"
#include "common/progress_word.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cache/proto_convert.h"

namespace promptcache::worker {
namespace {

absl::Status CheckShape(const node::v1::AcquireReply& reply, size_t num_keys) {
  const int n = static_cast<int>(num_keys);
  const int num_runs = reply.run_segments_size();
  if (reply.outcomes_size() != n || reply.miss_reasons_size() != n ||
      reply.num_runs_size() != n || reply.generations_size() != n ||
      reply.reservation_ids_size() != n || reply.differing_fields_size() != n ||
      reply.run_first_pages_size() != num_runs ||
      reply.run_num_pages_size() != num_runs ||
      // None when all are whole.
      (reply.progress_words_size() != n && reply.progress_words_size() != 0)) {
    return absl::InternalError(
        absl::StrCat("the daemon's answer is not one for ", n, " keys"));
  }
  uint64_t named_runs = 0;
  for (const uint32_t runs : reply.num_runs()) named_runs += runs;
  if (named_runs != static_cast<uint64_t>(num_runs)) {
    return absl::InternalError(absl::StrCat(
        "the daemon's answer counts ", named_runs, " runs and has ", num_runs));
  }
  return absl::OkStatus();
}

// Walks the flat arrays of a reply.
struct ReplyCursor {
  int run = 0;
  int page_sum = 0;
};

}  // namespace

LeaseClient::LeaseClient(std::shared_ptr<SessionClient> session,
                         const KvLayout& layout,
                         const CacheClient::AcquireArgs& args)
    : session_(std::move(session)),
      request_id_(session_->NextRequestId()),
      want_page_sums_(args.want_page_sums),
      modules_(args.keys.size()),
      generations_(args.keys.size()),
      progress_(args.keys.size()) {
  keys_.reserve(args.keys.size());
  for (const AcquireKey& key : args.keys) {
    keys_.push_back(
        {.key = key.key, .num_pages = layout.PagesFor(key.num_tokens)});
  }
}

absl::StatusOr<std::unique_ptr<CacheLease>> LeaseClient::Acquire(
    std::shared_ptr<SessionClient> session, const KvLayout& layout,
    const CacheClient::AcquireArgs& args, absl::Time deadline) {
  if (!session->AddUser()) return session->loss();
  std::unique_ptr<LeaseClient> lease(
      new LeaseClient(std::move(session), layout, args));
  SessionClient& stream = *lease->session_;
  // Before the call: a push may overtake the answer's reader.
  stream.Watch(lease->request_id_);
  PC_ASSIGN_OR_RETURN(
      const node::v1::SessionResponse response,
      stream.CallAcquire(
          ToProto(lease->request_id_, args, stream.welcome().joined_paths()),
          deadline));
  if (!response.has_acquire()) {
    return absl::InternalError("the daemon answered something else");
  }
  FaultPoint("acquired");
  absl::Status taken = lease->Take(response.acquire(), 0, args.keys.size());
  if (!taken.ok()) {
    LOG(ERROR) << "the session ends: " << taken;
    stream.Break(taken);
    return taken;
  }
  return lease;
}

LeaseClient::~LeaseClient() {
  session_->Unwatch(request_id_);
  std::vector<uint64_t> open;
  open.reserve(open_reservations_.size());
  for (const auto& [id, module] : open_reservations_) open.push_back(id);
  Abort(open);
  for (const uint64_t lease_id : lease_ids_) session_->Release(lease_id);
  session_->RemoveUser();
}

absl::Status LeaseClient::Take(const node::v1::AcquireReply& reply,
                               size_t first, size_t num_keys) {
  PC_RETURN_IF_ERROR(CheckShape(reply, num_keys));
  if (reply.lease_id() != 0) lease_ids_.push_back(reply.lease_id());
  ReplyCursor at;
  PageRefs pages;
  for (size_t i = 0; i < num_keys; ++i) {
    const int in_reply = static_cast<int>(i);
    const Key& key = keys_[first + i];
    AcquiredModule module;
    PC_ASSIGN_OR_RETURN(module.outcome, FromProto(reply.outcomes(in_reply)));
    module.miss_reason =
        static_cast<CacheMissReason>(reply.miss_reasons(in_reply));
    module.differing_field =
        static_cast<IdentityField>(reply.differing_fields(in_reply));
    module.generation = reply.generations(in_reply);
    module.reservation_id = reply.reservation_ids(in_reply);
    if (module.reservation_id != 0) {
      open_reservations_[module.reservation_id] = first + i;
    }
    const uint32_t progress_word =
        reply.progress_words().empty() ? 0 : reply.progress_words(in_reply);
    if (progress_word != 0) {
      PC_ASSIGN_OR_RETURN(progress_[first + i],
                          session_->memory().ProgressWordAt(progress_word));
      module.arriving = true;
    }
    const bool reserved = module.outcome == AcquireOutcome::kReserved;
    const bool has_pages = module.outcome == AcquireOutcome::kHit || reserved;
    pages.generations.clear();
    pages.on_host = true;
    if (has_pages) pages.read.reserve(key.num_pages);
    for (uint32_t run = 0; run < reply.num_runs(in_reply); ++run, ++at.run) {
      PC_RETURN_IF_ERROR(session_->memory().AppendRun(
          reply.run_segments(at.run), reply.run_first_pages(at.run),
          reply.run_num_pages(at.run), reserved, &pages));
    }
    if (pages.read.size() != (has_pages ? key.num_pages : 0)) {
      return absl::InternalError(absl::StrCat("module ", first + i, " has ",
                                              pages.read.size(), " pages, ",
                                              key.num_pages, " are due"));
    }
    if (module.outcome == AcquireOutcome::kHit && want_page_sums_) {
      const int end = at.page_sum + static_cast<int>(key.num_pages);
      if (end > reply.page_sums_size()) {
        return absl::InternalError("the daemon's answer lacks page sums");
      }
      module.page_sums.assign(reply.page_sums().begin() + at.page_sum,
                              reply.page_sums().begin() + end);
      at.page_sum = end;
    }
    module.read_pages = std::exchange(pages.read, {});
    module.write_pages = std::exchange(pages.write, {});
    module.on_host = pages.on_host;
    generations_[first + i] = {.begin = generation_words_.size(),
                               .count = pages.generations.size()};
    generation_words_.insert(generation_words_.end(), pages.generations.begin(),
                             pages.generations.end());
    modules_[first + i] = std::move(module);
  }
  return absl::OkStatus();
}

absl::Status LeaseClient::WaitPending(size_t index, absl::Time deadline) {
  if (index >= modules_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("module ", index, " of a lease over ", modules_.size()));
  }
  if (modules_[index].outcome != AcquireOutcome::kPending) {
    return absl::OkStatus();
  }
  PC_ASSIGN_OR_RETURN(const node::v1::AcquireReply reply,
                      session_->WaitResolved(
                          request_id_, static_cast<uint32_t>(index), deadline));
  const absl::Status taken = Take(reply, index, 1);
  if (!taken.ok()) {
    LOG(ERROR) << "the session ends: " << taken;
    session_->Break(taken);
  }
  return taken;
}

absl::StatusOr<std::vector<bool>> LeaseClient::Commit(
    const std::vector<CommitModule>& modules, absl::Time deadline) {
  node::v1::SessionRequest request;
  node::v1::CommitRequest* commit = request.mutable_commit();
  const uint64_t request_id = session_->NextRequestId();
  commit->set_request_id(request_id);
  for (const CommitModule& module : modules) {
    if (!open_reservations_.contains(module.reservation_id)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "reservation ", module.reservation_id, " is not open here"));
    }
    commit->add_reservation_ids(module.reservation_id);
    commit->mutable_page_sums()->Add(module.page_sums.begin(),
                                     module.page_sums.end());
    *commit->add_modules() = ToProto(module);
  }
  PC_ASSIGN_OR_RETURN(const node::v1::SessionResponse response,
                      session_->Call(request_id, std::move(request), deadline));
  FaultPoint("committed");
  if (response.commit().committed_size() != static_cast<int>(modules.size())) {
    return absl::InternalError(
        "the daemon's answer is not one for this commit");
  }
  std::vector<bool> committed;
  for (size_t i = 0; i < modules.size(); ++i) {
    committed.push_back(response.commit().committed(static_cast<int>(i)));
    const uint64_t id = modules[i].reservation_id;
    // An older daemon does not say.
    const bool pin_refused =
        static_cast<int>(i) < response.commit().pin_refused_size() &&
        response.commit().pin_refused(static_cast<int>(i));
    const auto open = open_reservations_.extract(id);
    if (open.empty()) continue;  // named twice
    AcquiredModule& module = modules_[open.mapped()];
    module.write_pages.clear();  // sealed, or gone
    module.pin_refused = pin_refused;
    if (!committed.back()) generations_[open.mapped()].count = 0;
  }
  return committed;
}

void LeaseClient::Abort(const std::vector<uint64_t>& reservation_ids) {
  if (reservation_ids.empty()) return;
  node::v1::SessionRequest request;
  for (const uint64_t id : reservation_ids) {
    request.mutable_abort()->add_reservation_ids(id);
    const auto open = open_reservations_.extract(id);
    if (open.empty()) continue;
    modules_[open.mapped()].write_pages.clear();
    generations_[open.mapped()].count = 0;
  }
  session_->Send(std::move(request));
}

bool LeaseClient::Valid(size_t index) const {
  if (index >= modules_.size() || generations_[index].count == 0) return false;
  if (session_->lost()) return false;
  // What was read of the pages was read before the words are looked at.
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t due = modules_[index].generation;
  const Range& range = generations_[index];
  return std::ranges::all_of(
      std::span(generation_words_).subspan(range.begin, range.count),
      [due](const uint64_t* word) {
        return __atomic_load_n(word, __ATOMIC_ACQUIRE) == due;
      });
}

ModuleProgress LeaseClient::Progress(size_t index) const {
  const uint64_t* const word = progress_[index];
  if (word == nullptr || session_->lost()) return {};
  const std::optional<uint64_t> state = ProgressState(
      __atomic_load_n(word, __ATOMIC_ACQUIRE), modules_[index].generation);
  if (!state.has_value() || *state > kMaxProgressLayers) return {};
  return {.num_layers = static_cast<uint32_t>(*state), .ended = false};
}

void LeaseClient::ReportCorruption(size_t index) {
  if (index >= modules_.size()) return;
  node::v1::SessionRequest request;
  request.mutable_report_corruption()->set_key(keys_[index].key.ToBytes());
  request.mutable_report_corruption()->set_generation(
      modules_[index].generation);
  session_->Send(std::move(request));
}

}  // namespace promptcache::worker
