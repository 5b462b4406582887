#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"
#include "common/progress_word.h"

namespace promptcache::daemon {

absl::StatusOr<SessionId> CacheState::OpenSession(ModuleCache::SessionArgs args,
                                                  absl::Time now,
                                                  Effects* effects) {
  const PageShape& shape = args.shape;
  if (shape.page_bytes == 0 || shape.page_bytes % sizeof(uint64_t) != 0 ||
      shape.page_tokens == 0 || shape.num_layers == 0 ||
      shape.num_layers > kMaxProgressLayers ||
      shape.page_bytes % shape.num_layers != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a page of ", shape.page_bytes, " bytes, ", shape.page_tokens,
        " tokens and ", shape.num_layers, " layers"));
  }
  if (args.device >= pool_->num_devices()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "device ", args.device, " of ", pool_->num_devices(), " devices"));
  }
  const PageAllocator& pages = device_tier(args.device).pages();
  if (pages.TotalPages(shape.page_bytes) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a page of ", shape.page_bytes, " bytes fits no segment of ",
        pool_->segment_bytes(pages.first_segment()), " bytes"));
  }
  const ProcessId process = args.process;
  if (dead_.contains(process)) {
    return absl::AbortedError("the worker's process has ended");
  }
  if (process != ProcessId{} && !args.worker_id.empty()) {
    std::vector<SessionId> superseded;
    for (const auto& [id, session] : sessions_) {
      if (session.args.process == process &&
          session.args.worker_id == args.worker_id) {
        superseded.push_back(id);
      }
    }
    for (SessionId id : superseded) {
      CloseSession(id, "superseded by the worker's new session", now, effects);
    }
    auto [begin, end] = lost_.equal_range(process);
    while (begin != end) {
      if (begin->second.worker_id != args.worker_id) {
        ++begin;
        continue;
      }
      EndLost(begin->second.entries);
      begin = lost_.erase(begin);
    }
  }
  const SessionId id{next_id_++};
  Session& session = sessions_[id];
  session.on_resolved =
      std::make_shared<const ModuleCache::ResolvedFn>(args.on_resolved);
  session.args = std::move(args);
  if (effects->want_events) {
    CacheEvent event;
    event.kind = CacheEvent::Kind::kSessionOpened;
    event.time = now;
    event.session = id;
    event.detail =
        absl::StrCat(session.args.worker_id, ", model ", session.args.model);
    effects->events.push_back(std::move(event));
  }
  return id;
}

void CacheState::CloseSession(SessionId id, std::string_view why,
                              absl::Time now, Effects* effects) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  const Session session = std::move(it->second);
  sessions_.erase(it);
  const ProcessId process = session.args.process;
  const bool may_live = process != ProcessId{} && !dead_.contains(process);

  LostHolds lost{.worker_id = session.args.worker_id};
  for (LeaseId lease_id : session.leases) {
    const auto lease = leases_.find(lease_id);
    const std::vector<Entry*> entries = std::move(lease->second.entries);
    leases_.erase(lease);
    for (Entry* entry : entries) {
      if (may_live) lost.entries.push_back(entry);
      Update(entry, [&] {
        --entry->num_leases;
        if (may_live) ++entry->num_lost;
      });
    }
  }
  for (ReservationId reservation : session.reservations) {
    Entry* const entry = reservations_.at(reservation);
    if (may_live) {
      lost.entries.push_back(entry);
      LoseReservation(entry, now, effects);
    } else {
      AbortReservation(entry, now, effects);
    }
  }
  const bool holds = !lost.entries.empty();
  if (holds) lost_.emplace(process, std::move(lost));
  if (effects->want_events) {
    CacheEvent event;
    event.kind = CacheEvent::Kind::kSessionClosed;
    event.time = now;
    event.session = id;
    event.detail = absl::StrCat(session.args.worker_id, ": ", std::string(why),
                                holds ? "; pages kept as lost" : "");
    effects->events.push_back(std::move(event));
  }
}

void CacheState::OnProcessDeath(ProcessId process, absl::Time now,
                                Effects* effects) {
  if (process == ProcessId{}) return;
  dead_.insert(process);
  std::vector<SessionId> open;
  for (const auto& [id, session] : sessions_) {
    if (session.args.process == process) open.push_back(id);
  }
  for (SessionId id : open) {
    CloseSession(id, "the process has ended", now, effects);
  }
  auto [begin, end] = lost_.equal_range(process);
  while (begin != end) {
    EndLost(begin->second.entries);
    begin = lost_.erase(begin);
  }
}

void CacheState::EndLost(const std::vector<Entry*>& entries) {
  for (Entry* entry : entries) {
    Update(entry, [&] { --entry->num_lost; });
  }
}

absl::Status CacheState::NoSession(SessionId id) {
  return absl::NotFoundError(
      absl::StrCat("session ", static_cast<uint64_t>(id), " is not open"));
}

}  // namespace promptcache::daemon
