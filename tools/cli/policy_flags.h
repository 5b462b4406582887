#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "promptcache/v1/schema.pb.h"

namespace promptcache::cli {

// "90s", "10m", "1h30m". Usage error for what is no time, or for ever.
absl::Status SetTtl(const std::string& text, v1::CachePolicy* policy);

// The flags --ttl, --absolute-ttl and --pin of the commands that put or warm.
class PolicyFlags {
 public:
  void AddTo(CLI::App* command);
  bool given() const { return !ttl_.empty() || absolute_ || pin_; }
  absl::StatusOr<v1::CachePolicy> Policy() const;

 private:
  std::string ttl_;
  bool absolute_ = false;
  bool pin_ = false;
};

}  // namespace promptcache::cli
