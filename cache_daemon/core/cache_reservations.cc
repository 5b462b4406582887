#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"

namespace promptcache::daemon {

absl::StatusOr<std::vector<CommitResult>> CacheState::Commit(
    SessionId session_id, std::span<const CommitModule> modules, absl::Time now,
    Effects* effects) {
  if (!sessions_.contains(session_id)) return NoSession(session_id);
  for (const CommitModule& module : modules) {
    const auto it = reservations_.find(module.reservation);
    if (it == reservations_.end()) continue;
    const Entry& entry = *it->second;
    if (entry.reservation->session != session_id) continue;
    if (module.page_sums.size() != entry.num_pages ||
        module.metadata.num_tokens != entry.metadata.num_tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "reservation ", static_cast<uint64_t>(module.reservation), ": ",
          module.page_sums.size(), " page sums and ",
          module.metadata.num_tokens, " tokens where it has ", entry.num_pages,
          " pages and ", entry.metadata.num_tokens, " tokens"));
    }
  }
  std::vector<CommitResult> results(modules.size());
  for (size_t i = 0; i < modules.size(); ++i) {
    CommitOne(session_id, modules[i], now, &results[i], effects);
  }
  return results;
}

void CacheState::CommitOne(SessionId session_id, const CommitModule& module,
                           absl::Time now, CommitResult* result,
                           Effects* effects) {
  const auto it = reservations_.find(module.reservation);
  if (it == reservations_.end() ||
      it->second->reservation->session != session_id) {
    return;  // gone: aborted, or another session's
  }
  Entry* const entry = it->second;
  const Reservation reservation = std::move(*entry->reservation);
  reservations_.erase(it);
  sessions_.at(session_id).reservations.erase(reservation.id);
  const auto lease = leases_.find(reservation.lease);
  const bool leased = lease != leases_.end();
  const ModuleInfo* known = known_.Find(entry->key);
  const bool wants_pin = module.metadata.policy.pin ||
                         (known != nullptr && known->pinned) ||
                         AnyPinned(entry->key);
  Update(entry, [&] {
    entry->reservation.reset();
    entry->state = ModuleState::kCommitted;
    std::string schema = std::move(entry->metadata.schema);
    std::string path = std::move(entry->metadata.path);
    entry->metadata = module.metadata;
    if (entry->metadata.schema.empty()) entry->metadata.schema = schema;
    if (entry->metadata.path.empty()) entry->metadata.path = path;
    entry->page_sums = module.page_sums;
    entry->ttl = module.metadata.policy.ttl.value_or(options_.default_ttl);
    entry->commit_time = now;
    entry->last_use_time = now;
    entry->expire_time = now + entry->ttl;
    entry->pinned =
        wants_pin && pinned_bytes() + entry->bytes() <= pin_budget_bytes();
    if (leased) ++entry->num_leases;
  });
  if (leased) lease->second.entries.push_back(entry);
  ScheduleExpiry(entry);
  known_.Remove(entry->key);
  known_.SetIdentity(entry->isolation_domain, entry->metadata.schema,
                     entry->metadata.path, reservation.parts);
  ++counters_.commits;
  Emit(CacheEvent::Kind::kCommitted, *entry, now, effects);
  result->committed = true;
  result->pinned = entry->pinned;
  result->pin_refused = wants_pin && !entry->pinned;
  if (result->pin_refused) ++counters_.pins_refused;
  result->key = entry->key;
  result->isolation_domain = entry->isolation_domain;
  ResolveHits(entry, reservation.waiters, now, effects);
}

void CacheState::ResolveHits(Entry* entry, std::span<const Waiter> waiters,
                             absl::Time now, Effects* effects) {
  for (const Waiter& waiter : waiters) {
    PendingResolved* resolved = Deliver(waiter, effects);
    if (resolved == nullptr) continue;
    Hit(entry, entry->device, waiter.purpose, waiter.want_page_sums, now,
        &resolved->module);
    resolved->lease = NewLease(waiter.session, {entry});
    CountResolved(*resolved, waiter, *entry);
  }
}

void CacheState::ResolveMisses(const Entry& entry,
                               std::span<const Waiter> waiters,
                               MissReason reason, IdentityField differing_field,
                               Effects* effects) {
  for (const Waiter& waiter : waiters) {
    PendingResolved* resolved = Deliver(waiter, effects);
    if (resolved == nullptr) continue;
    resolved->module.miss_reason = reason;
    resolved->module.differing_field = differing_field;
    CountResolved(*resolved, waiter, entry);
  }
}

void CacheState::CountResolved(const PendingResolved& resolved,
                               const Waiter& waiter, const Entry& entry) {
  CountLookup(resolved.module, waiter.purpose, entry.device,
              entry.metadata.num_tokens);
}

PendingResolved* CacheState::Deliver(const Waiter& waiter,
                                     Effects* effects) const {
  const auto it = sessions_.find(waiter.session);
  if (it == sessions_.end()) return nullptr;
  Effects::Delivery& delivery = effects->deliveries.emplace_back();
  delivery.to = it->second.on_resolved;
  delivery.resolved.request_id = waiter.request_id;
  delivery.resolved.index = waiter.index;
  return &delivery.resolved;
}

absl::Status CacheState::Abort(SessionId session_id,
                               std::span<const ReservationId> reservations,
                               absl::Time now, Effects* effects) {
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end()) return NoSession(session_id);
  absl::Status status;
  for (ReservationId id : reservations) {
    if (session->second.reservations.erase(id) == 0) {
      status.Update(absl::NotFoundError(absl::StrCat(
          "reservation ", static_cast<uint64_t>(id), " is not the session's")));
      continue;
    }
    AbortReservation(reservations_.at(id), now, effects);
  }
  return status;
}

void CacheState::AbortReservation(Entry* entry, absl::Time now,
                                  Effects* effects) {
  if (entry->num_holds > 0) {
    // Its pages are being zeroed for a holder that has ended meanwhile: the
    // next one must not write under that.
    LoseReservation(entry, now, effects);
    EndLost({entry});
    return;
  }
  CountAbort(*entry, now, effects);
  Reservation& reservation = *entry->reservation;
  const std::optional<Waiter> next = NextWriter(&reservation.waiters);
  if (next.has_value()) {
    reservations_.erase(reservation.id);
    entry->generation = NextGeneration();
    pool_->Stamp(entry->runs, entry->generation);
    HandOver(entry, *next, effects);
    return;
  }
  ResolveMisses(*entry, reservation.waiters, reservation.reason,
                reservation.differing_field, effects);
  HideReserved(entry, /*lost=*/false);
}

void CacheState::LoseReservation(Entry* entry, absl::Time now,
                                 Effects* effects) {
  CountAbort(*entry, now, effects);
  std::vector<Waiter> waiters = std::move(entry->reservation->waiters);
  const MissReason reason = entry->reservation->reason;
  const IdentityField field = entry->reservation->differing_field;

  const std::optional<Waiter> next = NextWriter(&waiters);
  std::unique_ptr<Entry> heir;
  if (next.has_value()) {
    heir = std::make_unique<Entry>();
    heir->key = entry->key;
    heir->metadata = entry->metadata;
    heir->isolation_domain = entry->isolation_domain;
    heir->domain_hash = entry->domain_hash;
    heir->shape = entry->shape;
    heir->device = entry->device;
    heir->num_pages = entry->num_pages;
    heir->reservation = std::make_unique<Reservation>();
    heir->reservation->reason = reason;
    heir->reservation->differing_field = field;
    heir->reservation->parts = entry->reservation->parts;
  }
  HideReserved(entry, /*lost=*/true);
  if (!next.has_value()) {
    ResolveMisses(*entry, waiters, reason, field, effects);
    return;
  }
  Entry* const added = AddReserved(std::move(heir), now, effects);
  if (added == nullptr) {
    waiters.insert(waiters.begin(), *next);
    ResolveMisses(*entry, waiters, MissReason::kNoMemory, IdentityField::kNone,
                  effects);
    return;
  }
  added->reservation->waiters = std::move(waiters);
  HandOver(added, *next, effects);
}

void CacheState::CountAbort(const Entry& entry, absl::Time now,
                            Effects* effects) {
  ++counters_.aborted_reservations;
  if (!effects->want_events) return;
  CacheEvent event =
      MakeEvent(CacheEvent::Kind::kReservationAborted, entry, now);
  event.session = entry.reservation->session;
  effects->events.push_back(std::move(event));
}

std::optional<Waiter> CacheState::NextWriter(
    std::vector<Waiter>* waiters) const {
  for (auto it = waiters->begin(); it != waiters->end(); ++it) {
    if (!it->reserve || !sessions_.contains(it->session)) continue;
    const Waiter next = *it;
    waiters->erase(it);
    return next;
  }
  return std::nullopt;
}

void CacheState::HandOver(Entry* entry, const Waiter& waiter,
                          Effects* effects) {
  Reservation& reservation = *entry->reservation;
  reservation.id = ReservationId{next_id_++};
  reservation.session = waiter.session;
  reservation.lease = NewLease(waiter.session, {});
  reservations_[reservation.id] = entry;
  sessions_.at(waiter.session).reservations.insert(reservation.id);
  PendingResolved* resolved = Deliver(waiter, effects);
  resolved->lease = reservation.lease;
  resolved->module.miss_reason = MissReason::kNotYetCommitted;
  ShowReservation(*entry, &resolved->module);
  CountResolved(*resolved, waiter, *entry);
}

}  // namespace promptcache::daemon
