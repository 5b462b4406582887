#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "cache_daemon/core/types.h"

namespace promptcache::daemon {

// What is remembered of modules that are not resident, so that a miss has a
// reason: why each went, and which identity a name last had. Both memories are
// bounded; the oldest is forgotten, and its miss is "never seen" again.
// Thread-compatible.
class KnownModules {
 public:
  explicit KnownModules(size_t capacity) : capacity_(capacity) {}

  // `info.absence` says why. Replaces what was known of the key.
  void Add(ModuleInfo info);
  void Remove(const ModuleKey& key);
  const ModuleInfo* Find(const ModuleKey& key) const;
  // To change its policy or pin; nothing else.
  ModuleInfo* FindMutable(const ModuleKey& key);
  // In the order of keys: the first one at or after `key`, or after it.
  const ModuleInfo* FirstFrom(const ModuleKey& key) const;
  const ModuleInfo* FirstAfter(const ModuleKey& key) const;

  // A module with this name has this identity now.
  void SetIdentity(std::string_view domain, std::string_view schema,
                   std::string_view path, const IdentityParts& parts);
  // The first field in which `parts` differ from the name's last identity;
  // kNone when the name is unknown, or all are equal, or `parts` are zero.
  IdentityField Differing(std::string_view domain, std::string_view schema,
                          std::string_view path,
                          const IdentityParts& parts) const;

  size_t num_modules() const { return modules_.size(); }
  size_t num_names() const { return names_.size(); }
  absl::Status CheckInvariants() const;

 private:
  struct Module {
    ModuleInfo info;
    uint64_t age = 0;
  };
  struct Name {
    IdentityParts parts{};
    uint64_t age = 0;
  };
  // Oldest first; an element whose age is not the map's is stale.
  template <typename Key>
  using AgeQueue = std::deque<std::pair<Key, uint64_t>>;
  static uint64_t NameHash(std::string_view domain, std::string_view schema,
                           std::string_view path);
  template <typename Map, typename Key>
  void Trim(Map* map, AgeQueue<Key>* ages) const;

  const size_t capacity_;
  uint64_t next_age_ = 1;
  absl::btree_map<ModuleKey, std::unique_ptr<Module>> modules_;
  AgeQueue<ModuleKey> module_ages_;
  // By hash: two names that collide can only make a reason less precise.
  absl::flat_hash_map<uint64_t, std::unique_ptr<Name>> names_;
  AgeQueue<uint64_t> name_ages_;
};

}  // namespace promptcache::daemon
