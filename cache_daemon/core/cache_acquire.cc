#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"
#include "common/digest.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// 0 and 1 mean other things to PageAllocator.
uint64_t DomainHash(std::string_view domain) {
  const Digest digest = Sha256Of(domain);
  uint64_t hash;
  std::memcpy(&hash, digest.bytes.data(), sizeof(hash));
  return hash < 2 ? hash + 2 : hash;
}

// A request reads what was found, or would have kept what was not.
bool CountsHits(AcquirePurpose purpose) {
  return purpose == AcquirePurpose::kRequest ||
         purpose == AcquirePurpose::kProbe;
}

constexpr size_t kCacheLineBytes = 64;

void PrefetchForWrite(const void* p) { __builtin_prefetch(p, /*rw=*/1); }

// Every line of it.
void PrefetchObject(const Entry* entry) {
  const auto* bytes = reinterpret_cast<const char*>(entry);
  for (size_t i = 0; i < sizeof(Entry); i += kCacheLineBytes) {
    PrefetchForWrite(bytes + i);
  }
}

}  // namespace

absl::StatusOr<AcquireResult> CacheState::Acquire(SessionId session_id,
                                                  const AcquireRequest& request,
                                                  absl::Time now,
                                                  Effects* effects) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return NoSession(session_id);
  Session& session = it->second;
  PC_RETURN_IF_ERROR(
      ValidateAcquire(session, request, PrefetchEntries(request)));
  if (session.domain_hash == 0 || session.domain != request.isolation_domain) {
    session.domain = request.isolation_domain;
    session.domain_hash = DomainHash(request.isolation_domain);
  }

  AcquireResult result;
  result.modules.resize(request.keys.size());
  Asked asked{.request = &request,
              .session_id = session_id,
              .session = &session,
              .domain_hash = session.domain_hash,
              .result = &result};
  // Everything that is there is leased before anything is evicted for what is
  // not.
  std::vector<size_t> missing;
  for (size_t i = 0; i < request.keys.size(); ++i) {
    if (!AnswerPresent(&asked, i, now, effects)) missing.push_back(i);
  }
  for (size_t i : missing) AnswerMissing(&asked, i, now, effects);
  for (size_t i = 0; i < request.keys.size(); ++i) {
    CountLookup(result.modules[i], request.purpose, session.args.device,
                request.keys[i].num_tokens);
  }
  if (result.lease != LeaseId{}) {
    leases_[result.lease].entries = std::move(asked.leased);
  }
  return result;
}

std::vector<const Entry*> CacheState::PrefetchEntries(
    const AcquireRequest& request) const {
  for (const AcquireKey& key : request.keys) visible_.prefetch(key.key);
  std::vector<const Entry*> entries;
  entries.reserve(request.keys.size());
  for (const AcquireKey& key : request.keys) {
    entries.push_back(FirstCopy(key.key));
    if (entries.back() != nullptr) PrefetchObject(entries.back());
  }
  for (const Entry* entry : entries) {
    if (entry == nullptr) continue;
    // What leaving the LRU list writes, and what the answer copies.
    if (entry->lru_prev != nullptr)
      PrefetchForWrite(&entry->lru_prev->lru_next);
    if (entry->lru_next != nullptr)
      PrefetchForWrite(&entry->lru_next->lru_prev);
    if (!entry->runs.empty()) __builtin_prefetch(entry->runs.data());
  }
  return entries;
}

absl::Status CacheState::ValidateAcquire(
    const Session& session, const AcquireRequest& request,
    std::span<const Entry* const> entries) {
  for (size_t i = 0; i < request.keys.size(); ++i) {
    const AcquireKey& key = request.keys[i];
    if (key.num_tokens == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("module ", key.key.ToHex(), " has no tokens"));
    }
    // All copies of a key are alike in this.
    const Entry* const entry = entries[i];
    if (entry != nullptr && entry->shape == session.args.shape &&
        entry->metadata.num_tokens != key.num_tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "module ", key.key.ToHex(), " has ", entry->metadata.num_tokens,
          " tokens, not ", key.num_tokens));
    }
  }
  return absl::OkStatus();
}

bool CacheState::AnswerPresent(Asked* asked, size_t index, absl::Time now,
                               Effects* effects) {
  const AcquireKey& key = asked->request->keys[index];
  const uint32_t device = asked->session->args.device;
  AcquiredModule& out = asked->result->modules[index];
  Entry* first = FirstCopy(key.key);
  Entry* entry = AnswerAmong(first, device);
  while (entry != nullptr && ExpiredNow(*entry, now)) {
    Hide(entry, EvictReason::kExpired, now, effects);
    first = FirstCopy(key.key);
    entry = AnswerAmong(first, device);
  }
  if (first == nullptr) {
    ExplainMiss(*asked, index, first);
    return false;
  }
  // All copies are alike in domain and shape.
  if (first->domain_hash != asked->domain_hash) {
    // Keys contain the domain: such a key is forged. It learns nothing.
    out.miss_reason = MissReason::kNeverSeen;
    return true;
  }
  if (first->shape != asked->session->args.shape) {
    // The page size is no part of the key: the same states in another carving.
    out.miss_reason = MissReason::kIdentityDiffers;
    out.differing_field = IdentityField::kLayout;
    return true;
  }
  if (entry == nullptr) {
    ExplainMiss(*asked, index, first);
    return false;
  }
  if (entry->state == ModuleState::kReserved) {
    out.miss_reason = MissReason::kNotYetCommitted;
    if (asked->request->no_wait) return true;
    out.outcome = Outcome::kPending;
    entry->reservation->waiters.push_back(
        {.session = asked->session_id,
         .request_id = asked->request->request_id,
         .index = static_cast<uint32_t>(index),
         .purpose = asked->request->purpose,
         .want_page_sums = asked->request->want_page_sums,
         .reserve = asked->request->reserve_missing});
    return true;
  }
  const ModuleCache::SessionArgs& args = asked->session->args;
  if (entry->progress_word != 0 && !args.reads_arriving) {
    out.miss_reason = MissReason::kNotYetCommitted;
    return true;
  }
  const Tier found_in = entry->tier;
  if (args.reads_arriving) StartArrival(entry, device, effects);
  LeaseOf(asked);
  Hit(entry, device, asked->request->purpose, asked->request->want_page_sums,
      now, &out);
  out.found_in = found_in;  // not where it is promoted to
  asked->leased.push_back(entry);
  return true;
}

void CacheState::ExplainMiss(const Asked& asked, size_t index,
                             const Entry* first_copy) {
  const AcquireKey& key = asked.request->keys[index];
  AcquiredModule& out = asked.result->modules[index];
  for (; first_copy != nullptr; first_copy = first_copy->next_copy.get()) {
    if (!first_copy->resident()) continue;  // being encoded there
    out.miss_reason = MissReason::kOnOtherDevice;
    return;
  }
  if (const ModuleInfo* known = known_.Find(key.key); known != nullptr) {
    out.miss_reason = known->absence;
    return;
  }
  out.differing_field =
      known_.Differing(asked.request->isolation_domain, asked.request->schema,
                       key.path, key.parts);
  out.miss_reason = out.differing_field == IdentityField::kNone
                        ? MissReason::kNeverSeen
                        : MissReason::kIdentityDiffers;
}

void CacheState::AnswerMissing(Asked* asked, size_t index, absl::Time now,
                               Effects* effects) {
  const AcquireRequest& request = *asked->request;
  const AcquireKey& key = request.keys[index];
  AcquiredModule& out = asked->result->modules[index];
  if (!request.reserve_missing) return;
  if (AnswerAmong(FirstCopy(key.key), asked->session->args.device) != nullptr) {
    // Named twice in one request.
    AnswerPresent(asked, index, now, effects);
    return;
  }
  auto entry = std::make_unique<Entry>();
  entry->key = key.key;
  entry->metadata.schema = request.schema;
  entry->metadata.path = key.path;
  entry->metadata.num_tokens = key.num_tokens;
  entry->isolation_domain = request.isolation_domain;
  entry->domain_hash = asked->domain_hash;
  entry->shape = asked->session->args.shape;
  entry->device = asked->session->args.device;
  entry->num_pages = entry->shape.PagesFor(key.num_tokens);
  entry->reservation = std::make_unique<Reservation>();
  entry->reservation->reason = out.miss_reason;
  entry->reservation->differing_field = out.differing_field;
  entry->reservation->parts = key.parts;
  Entry* const added = AddReserved(std::move(entry), now, effects);
  if (added == nullptr) {
    out.miss_reason = MissReason::kNoMemory;
    out.differing_field = IdentityField::kNone;
    return;
  }
  Reservation& reservation = *added->reservation;
  reservation.id = ReservationId{next_id_++};
  reservation.session = asked->session_id;
  reservation.lease = LeaseOf(asked);
  reservations_[reservation.id] = added;
  asked->session->reservations.insert(reservation.id);
  ShowReservation(*added, &out);
}

void CacheState::CountLookup(const AcquiredModule& module,
                             AcquirePurpose purpose, uint32_t device,
                             uint32_t num_tokens) {
  if (module.outcome == Outcome::kPending || !CountsHits(purpose)) return;
  if (module.outcome == Outcome::kHit) {
    ++counters_.hit_lookups;
    counters_.hit_tokens += num_tokens;
    Counted& hits = tier_counters_[IndexOf(module.found_in, device)].hits;
    ++hits.count;
    hits.volume += num_tokens;
  } else if (purpose == AcquirePurpose::kProbe) {
    ++counters_.missed_probes.count;
    counters_.missed_probes.volume += num_tokens;
  } else {
    CountMiss(module, num_tokens);
  }
}

void CacheState::CountMiss(const AcquiredModule& module, uint32_t num_tokens) {
  ++counters_.miss_lookups;
  counters_.miss_tokens += num_tokens;
  Counted& counted = counters_.misses[static_cast<size_t>(module.miss_reason)];
  ++counted.count;
  counted.volume += num_tokens;
  if (module.miss_reason != MissReason::kIdentityDiffers) return;
  Counted& differing =
      counters_.differing[static_cast<size_t>(module.differing_field)];
  ++differing.count;
  differing.volume += num_tokens;
}

LeaseId CacheState::LeaseOf(Asked* asked) {
  if (asked->result->lease == LeaseId{}) {
    asked->result->lease = NewLease(asked->session_id, {});
  }
  return asked->result->lease;
}

LeaseId CacheState::NewLease(SessionId session, std::vector<Entry*> entries) {
  const LeaseId id{next_id_++};
  leases_[id] = {session, std::move(entries)};
  sessions_.at(session).leases.insert(id);
  return id;
}

void CacheState::Hit(Entry* entry, uint32_t device, AcquirePurpose purpose,
                     bool want_page_sums, absl::Time now, AcquiredModule* out) {
  Update(entry, [&] {
    ++entry->num_leases;
    if (CountsHits(purpose)) ++entry->hits;
    entry->Touch(now);
  });
  if (entry->state == ModuleState::kMoving) entry->move_cancelled = true;
  if (entry->tier == Tier::kHost) {
    entry->wants_promotion = true;
    entry->promote_to = device;
  }
  out->outcome = Outcome::kHit;
  out->miss_reason = MissReason::kNone;
  out->tier = entry->tier;
  out->found_in = entry->tier;
  out->generation = entry->generation;
  out->progress_word = entry->progress_word;
  out->runs = entry->runs;
  if (want_page_sums) out->page_sums = entry->page_sums;
}

void CacheState::ShowReservation(const Entry& entry, AcquiredModule* out) {
  out->outcome = Outcome::kReserved;
  out->reservation = entry.reservation->id;
  out->tier = entry.tier;
  out->generation = entry.generation;
  out->runs = entry.runs;
}

absl::Status CacheState::Release(SessionId session_id, LeaseId lease_id,
                                 absl::Time now, Effects* effects) {
  const auto lease = leases_.find(lease_id);
  if (lease == leases_.end() || lease->second.session != session_id) {
    return absl::NotFoundError(absl::StrCat(
        "lease ", static_cast<uint64_t>(lease_id), " is not the session's"));
  }
  const std::vector<Entry*> entries = std::move(lease->second.entries);
  leases_.erase(lease);
  sessions_.at(session_id).leases.erase(lease_id);
  for (Entry* entry : entries) {
    const bool visible = !entry->hidden;
    Update(entry, [&] {
      --entry->num_leases;
      if (visible) entry->Touch(now);
    });
    if (visible) QueuePromotion(entry, effects);
  }
  return absl::OkStatus();
}

void CacheState::ReportUse(const RequestUse& use) {
  counters_.request_cached_tokens += use.cached_tokens;
  counters_.request_created_tokens += use.created_tokens;
  counters_.request_fresh_tokens += use.fresh_tokens;
  counters_.request_preemptions += use.preemptions;
  counters_.request_recomputed_tokens += use.recomputed_tokens;
  counters_.attention_needed_tokens += use.attention_needed_tokens;
  counters_.attention_read_tokens += use.attention_read_tokens;
}

}  // namespace promptcache::daemon
