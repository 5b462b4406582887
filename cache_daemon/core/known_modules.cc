#include "cache_daemon/core/known_modules.h"

#include <utility>

#include "absl/hash/hash.h"

namespace promptcache::daemon {

void KnownModules::Add(ModuleInfo info) {
  if (capacity_ == 0) return;
  const ModuleKey key = info.key;
  std::unique_ptr<Module>& module = modules_[key];
  if (module == nullptr) module = std::make_unique<Module>();
  module->info = std::move(info);
  module->age = next_age_++;
  module_ages_.emplace_back(key, module->age);
  Trim(&modules_, &module_ages_);
}

void KnownModules::Remove(const ModuleKey& key) { modules_.erase(key); }

const ModuleInfo* KnownModules::Find(const ModuleKey& key) const {
  const auto it = modules_.find(key);
  return it == modules_.end() ? nullptr : &it->second->info;
}

ModuleInfo* KnownModules::FindMutable(const ModuleKey& key) {
  const auto it = modules_.find(key);
  return it == modules_.end() ? nullptr : &it->second->info;
}

const ModuleInfo* KnownModules::FirstFrom(const ModuleKey& key) const {
  const auto it = modules_.lower_bound(key);
  return it == modules_.end() ? nullptr : &it->second->info;
}

const ModuleInfo* KnownModules::FirstAfter(const ModuleKey& key) const {
  const auto it = modules_.upper_bound(key);
  return it == modules_.end() ? nullptr : &it->second->info;
}

void KnownModules::SetIdentity(std::string_view domain, std::string_view schema,
                               std::string_view path,
                               const IdentityParts& parts) {
  if (capacity_ == 0 || parts == IdentityParts{}) return;
  const uint64_t hash = NameHash(domain, schema, path);
  std::unique_ptr<Name>& name = names_[hash];
  if (name == nullptr) name = std::make_unique<Name>();
  name->parts = parts;
  name->age = next_age_++;
  name_ages_.emplace_back(hash, name->age);
  Trim(&names_, &name_ages_);
}

IdentityField KnownModules::Differing(std::string_view domain,
                                      std::string_view schema,
                                      std::string_view path,
                                      const IdentityParts& parts) const {
  if (parts == IdentityParts{}) return IdentityField::kNone;
  const auto it = names_.find(NameHash(domain, schema, path));
  if (it == names_.end()) return IdentityField::kNone;
  for (size_t i = 0; i < kNumIdentityFields; ++i) {
    if (it->second->parts[i] != parts[i]) {
      return static_cast<IdentityField>(i + 1);
    }
  }
  return IdentityField::kNone;
}

absl::Status KnownModules::CheckInvariants() const {
  if (modules_.size() > capacity_ || names_.size() > capacity_) {
    return absl::InternalError("more known than the bound allows");
  }
  if (module_ages_.size() < modules_.size() ||
      name_ages_.size() < names_.size()) {
    return absl::InternalError("a known module has no age");
  }
  return absl::OkStatus();
}

uint64_t KnownModules::NameHash(std::string_view domain,
                                std::string_view schema,
                                std::string_view path) {
  return absl::HashOf(domain, schema, path);
}

template <typename Map, typename Key>
void KnownModules::Trim(Map* map, AgeQueue<Key>* ages) const {
  // The second condition bounds the stale ages, at constant cost per addition.
  while (map->size() > capacity_ || ages->size() > 2 * map->size() + 16) {
    const auto [key, age] = ages->front();
    ages->pop_front();
    const auto it = map->find(key);
    if (it == map->end() || it->second->age != age) continue;
    if (map->size() > capacity_) {
      map->erase(it);
    } else {
      ages->emplace_back(key, age);
    }
  }
}

}  // namespace promptcache::daemon
