#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_daemon/core/cache_state.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

absl::Status Broken(const Entry& entry, std::string_view what) {
  return absl::InternalError(absl::StrCat(
      "module ", entry.key.ToHex().substr(0, 8), " (",
      std::string(ModuleStateName(entry.state)), "): ", std::string(what)));
}

uint64_t PagesIn(const PageRuns& runs) {
  uint64_t pages = 0;
  for (const PageRun& run : runs) pages += run.num_pages;
  return pages;
}

}  // namespace

absl::Status CacheState::CheckInvariants() const {
  for (const std::unique_ptr<TierState>& state : tiers_) {
    PC_RETURN_IF_ERROR(state->pages().CheckInvariants());
  }
  PC_RETURN_IF_ERROR(known_.CheckInvariants());
  if (ordered_.size() != visible_.size()) {
    return absl::InternalError("the order of keys and the map differ");
  }
  size_t num_visible = 0;
  for (const auto& [key, first] : visible_) {
    if (!ordered_.contains(key) || first == nullptr) {
      return absl::InternalError("a key without order or copies");
    }
    PC_RETURN_IF_ERROR(CheckCopies(key));
    for (const Entry* e = first.get(); e != nullptr; e = e->next_copy.get()) {
      ++num_visible;
      PC_RETURN_IF_ERROR(CheckEntry(*e, /*visible=*/true));
    }
  }
  if (num_visible != num_visible_) {
    return absl::InternalError("number of visible copies");
  }
  for (const auto& [pointer, entry] : hidden_) {
    if (pointer != entry.get()) return Broken(*entry, "hidden map");
    if (entry->next_copy != nullptr) return Broken(*entry, "hidden copies");
    PC_RETURN_IF_ERROR(CheckEntry(*entry, /*visible=*/false));
  }
  PC_RETURN_IF_ERROR(CheckUsers());
  return CheckTallies();
}

absl::Status CacheState::CheckCopies(const ModuleKey& key) const {
  const Entry& first = *visible_.at(key);
  std::vector<bool> seen(tiers_.size());
  for (const Entry* e = &first; e != nullptr; e = e->next_copy.get()) {
    if (e->key != key) return Broken(*e, "is filed under another key");
    if (e->domain_hash != first.domain_hash || e->shape != first.shape ||
        e->metadata.num_tokens != first.metadata.num_tokens) {
      return Broken(*e, "differs from another copy");
    }
    if (seen[IndexOf(*e)]) return Broken(*e, "is in its tier twice");
    seen[IndexOf(*e)] = true;
  }
  return absl::OkStatus();
}

absl::Status CacheState::CheckEntry(const Entry& entry, bool visible) const {
  if (entry.hidden == visible) return Broken(entry, "hidden flag");
  if (entry.num_pages == 0 ||
      entry.num_pages != entry.shape.PagesFor(entry.metadata.num_tokens) ||
      PagesIn(entry.runs) != entry.num_pages) {
    return Broken(entry, "number of pages");
  }
  if ((entry.state == ModuleState::kReserved) !=
      (entry.reservation != nullptr)) {
    return Broken(entry, "reservation");
  }
  if (entry.in_lru != entry.evictable()) return Broken(entry, "LRU list");
  switch (entry.state) {
    case ModuleState::kReserved:
      if (!visible || entry.num_leases + entry.num_lost > 0) {
        return Broken(entry, "a reservation is hidden or leased");
      }
      break;
    case ModuleState::kCommitted:
    case ModuleState::kMoving:
      if (!visible) return Broken(entry, "hidden, yet an answer");
      if (entry.page_sums.size() != entry.num_pages) {
        return Broken(entry, "page sums");
      }
      break;
    case ModuleState::kEvicted:
    case ModuleState::kQuarantined:
      if (visible || !entry.used()) return Broken(entry, "kept for nobody");
      break;
    case ModuleState::kNone:
      return Broken(entry, "has no state");
  }
  for (const PageRun& run : entry.runs) {
    for (uint32_t i = 0; i < run.num_pages; ++i) {
      if (pool_->tier(run.segment) != entry.tier ||
          pool_->device(run.segment) != entry.device ||
          pool_->Generation(run.segment, run.first_page + i) !=
              entry.generation) {
        return Broken(entry, "tier or generation of a page");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CacheState::CheckUsers() const {
  absl::flat_hash_map<const Entry*, uint32_t> leases;
  absl::flat_hash_map<const Entry*, uint32_t> lost;
  size_t num_leases = 0;
  size_t num_reservations = 0;
  for (const auto& [id, session] : sessions_) {
    num_leases += session.leases.size();
    num_reservations += session.reservations.size();
    for (LeaseId lease : session.leases) {
      const auto it = leases_.find(lease);
      if (it == leases_.end() || it->second.session != id) {
        return absl::InternalError("a session's lease");
      }
      for (const Entry* entry : it->second.entries) ++leases[entry];
    }
    for (ReservationId reservation : session.reservations) {
      const auto it = reservations_.find(reservation);
      if (it == reservations_.end() || it->second->reservation->session != id ||
          it->second->reservation->id != reservation) {
        return absl::InternalError("a session's reservation");
      }
    }
  }
  if (num_leases != leases_.size() ||
      num_reservations != reservations_.size()) {
    return absl::InternalError("a lease or reservation without a session");
  }
  for (const auto& [process, holds] : lost_) {
    if (dead_.contains(process)) return absl::InternalError("held for a dead");
    for (const Entry* entry : holds.entries) ++lost[entry];
  }
  uint64_t reserved = 0;
  const auto check = [&](const Entry& entry) {
    reserved += entry.state == ModuleState::kReserved ? 1 : 0;
    return leases[&entry] == entry.num_leases && lost[&entry] == entry.num_lost;
  };
  for (const auto& [key, first] : visible_) {
    for (const Entry* e = first.get(); e != nullptr; e = e->next_copy.get()) {
      if (!check(*e)) return Broken(*e, "number of users");
    }
  }
  for (const auto& [pointer, entry] : hidden_) {
    if (!check(*entry)) return Broken(*entry, "number of users");
  }
  return reserved == reservations_.size()
             ? absl::OkStatus()
             : absl::InternalError("number of reservations");
}

absl::Status CacheState::CheckTallies() const {
  Tally tally;
  tally.tiers.resize(tiers_.size());
  std::vector<uint64_t> used_bytes(tiers_.size());
  std::vector<uint64_t> evictable(tiers_.size());
  const auto add = [&](const Entry& entry) {
    Count(entry, 1, &tally);
    const size_t t = IndexOf(entry);
    used_bytes[t] += entry.bytes();
    evictable[t] += entry.evictable() ? 1 : 0;
  };
  for (const auto& [key, first] : visible_) {
    for (const Entry* e = first.get(); e != nullptr; e = e->next_copy.get()) {
      add(*e);
    }
  }
  for (const auto& [pointer, entry] : hidden_) add(*entry);
  for (const auto& [id, move] : moves_) {
    const size_t t = IndexOf(move.to, move.device);
    tally.tiers[t].moving_bytes += move.bytes;
    used_bytes[t] += move.bytes;
    if (move.entry->num_holds == 0) return Broken(*move.entry, "moves unheld");
  }
  for (const auto& [id, arrival] : arrivals_) {
    const size_t t = tiers_.size() - 1;
    tally.tiers[t].moving_bytes += arrival.bytes;
    used_bytes[t] += arrival.bytes;
    const Entry& entry = *arrival.entry;
    if (entry.num_holds == 0 || entry.progress_word == 0) {
      return Broken(entry, "arrives unheld");
    }
  }
  if (arrivals_.size() + free_progress_words_.size() + 1 !=
      PagePool::kNumProgressWords) {
    return absl::InternalError("number of progress words");
  }
  for (size_t t = 0; t < tiers_.size(); ++t) {
    const TierTally& a = tally.tiers[t];
    const TierTally& b = tally_.tiers[t];
    if (a.leased_bytes != b.leased_bytes || a.pinned_bytes != b.pinned_bytes ||
        a.reserved_bytes != b.reserved_bytes ||
        a.moving_bytes != b.moving_bytes ||
        a.quarantined_bytes != b.quarantined_bytes || a.modules != b.modules) {
      return absl::InternalError("bytes of a tier");
    }
    if (used_bytes[t] != tiers_[t]->pages().used_bytes()) {
      return absl::InternalError("used bytes of a tier");
    }
    if (evictable[t] != tiers_[t]->lru_entries()) {
      return absl::InternalError("length of an LRU list");
    }
  }
  return pinned_bytes() <= options_.pin_budget_bytes
             ? absl::OkStatus()
             : absl::InternalError("pin budget");
}

}  // namespace promptcache::daemon
