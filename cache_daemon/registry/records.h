#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "common/digest.h"
#include "common/module_identity.h"

namespace promptcache::daemon {

// Rows of the registry, as plain values.

// How long a module's KV stays.
struct PolicyRecord {
  std::optional<absl::Duration> ttl;  // unset: the daemon's default
  bool absolute_ttl = false;          // from the commit, not from the last use
  bool pin = false;

  friend bool operator==(const PolicyRecord&, const PolicyRecord&) = default;
};

struct SchemaRecord {
  std::string name;
  uint64_t revision = 0;  // from 1
  std::string text;       // empty in lists
  Digest text_sha256;
  absl::Time create_time;  // of this revision
  // Of the schema, whatever the revision.
  PolicyRecord policy;
  std::map<std::string, PolicyRecord> module_policies;  // by path
};

// What is known of a module whether its KV is resident or not.
struct ModuleRecord {
  ModuleKey key;
  std::string schema;
  std::string path;
  std::string isolation_domain;
  uint32_t num_tokens = 0;
  uint64_t num_bytes = 0;
  Digest text_sha256;
  Digest context_key;
  IdentityParts parts{};
  uint64_t compute_us = 0;
  absl::Time commit_time;
  // The commit's; `pin` is what holds now. After a restart nothing else of it
  // is used: the module comes back by another commit, with that one's policy.
  PolicyRecord policy;
};

}  // namespace promptcache::daemon
